"""Steps in flight: launched up to the forward pass, then including sampling."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from worker.plan.plan import Plan, RankTimes, StepResult
from worker.rank.adapters import RankAdapters
from worker.rank.batch import Batch
from worker.rank.device_clock import DeviceClock
from worker.rank.diffusion.ahead import RoundAhead
from worker.rank.diffusion.canvas import CanvasStep
from worker.rank.diffusion.decoder import BlockStep
from worker.rank.diffusion.results import BlockResults
from worker.rank.host_pages import HostPages
from worker.rank.pooling import PooledRows, PooledVectors
from worker.rank.sampler import SamplerOutput
from worker.rank.sampling.logprobs import Scores
from worker.rank.sampling.masks import MaskRows
from worker.rank.speculation.drafter import DraftedStep
from worker.rank.streams import StepSlot
from worker.rank.tables import DeviceTables
from worker.rank.verification import AcceptedTokens


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardStep:
    """A step whose forward pass is launched but whose sampling is not."""

    plan: Plan
    batch: Batch | None
    """Batch of the step; None for a Plan without rows."""
    hidden: torch.Tensor | None
    """Hidden states of the sampled tokens or of all tokens; None for a Plan without rows."""
    drafted: DraftedStep | None = None
    """Drafts of the step; None if there are no speculative rows."""
    blocks: BlockStep | CanvasStep | None = None
    """Running blocks or canvases of a block-diffusion model; None for other models."""
    pooled: PooledRows | None = None
    """Rows of a pooling model; None for other models."""
    times: tuple[float, float, float]
    """Host times in seconds: at the start, after preparation, and after launching the forward pass.
    """
    copy_s: float = 0.0
    """Seconds spent on copies to and from host memory, between the first two of `times`."""
    slot: StepSlot | None
    """Buffers and events of the step; None on CPU."""

    def masked_drafts(self) -> list[list[int]]:
        """Drafts of each masked row; only for steps whose Plan has `drafts_under_grammar`."""
        assert self.drafted is not None, "no row is speculative"
        return self.drafted.masked_drafts(self.plan)

    def mask_rows(self, masks: bytes, tables: DeviceTables) -> MaskRows | None:
        """Masked rows of the logits, with `masks` from the Sample message; None if none of them
        samples."""
        vocab_size, device = tables.vocab_size, tables.token_pool.device
        if self.drafted is None:
            return MaskRows(self.plan.masked, masks, vocab_size, device)
        samples, kept = self.drafted.masked_samples(self.plan, masks, -(-vocab_size // 32) * 4)
        return MaskRows(samples, kept, vocab_size, device) if samples else None


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledStep:
    """A completely launched step, whose results are being copied to the host."""

    seq: int
    output: SamplerOutput | None
    """Sampled tokens and scores, on the host once the slot's step has completed; None if nothing is
    sampled or scored."""
    sampled_rows: Sequence[int] | None = None
    """Indices of the sampled tokens that are used; None for all tokens."""
    times: RankTimes
    """Host times of the step; on CUDA, the times at which its work was launched."""
    compute_ms: float
    """Milliseconds that the host spent on the step, excluding waits for masks and copies; on CUDA,
    `result` reports device time instead."""
    slot: StepSlot | None = None
    """Buffers and events of the step; None on CPU, where a launched step has completed."""
    clock: DeviceClock | None = None
    reports_logprobs: bool
    """Whether this rank reports log-probabilities; true on rank 0 only."""
    accepted: AcceptedTokens | None = None
    """Acceptance of drafts; None if there are no speculative rows."""
    blocks: BlockResults | RoundAhead | None = None
    """Outcomes of running blocks; those of a round ahead are on the host once the slot's step has
    completed. None for autoregressive models."""
    pooled: PooledVectors | None = None
    """Vectors that rank 0 reports; None if there are none, and on other ranks."""
    host_pages: HostPages | None = None
    """Host-memory tier, which reports completed loads; None if there is none."""
    adapters: RankAdapters | None = None
    """LoRA adapters, which report completed reads; None if they are disabled."""

    def result(self) -> StepResult:
        """The step's result; waits for the device. Must be called in launch order.

        Raises:
            RuntimeError: the device failed.
        """
        times, compute_ms = self.times, self.compute_ms
        if self.slot is not None and self.clock is not None:
            waited = self.slot.wait()
            times = self.clock.place(
                self.slot.events, launched=times.started, seen=time.monotonic(), waited=waited
            )
            compute_ms = (times.finished - times.started) * 1e3
        output, token_ids = self.output, list[int]()
        if output is not None and output.tokens is not None:
            token_ids = output.tokens.tolist()
            if self.sampled_rows is not None:
                token_ids = [token_ids[row] for row in self.sampled_rows]
        load_ms, loading = (0.0, 0)
        if self.host_pages is not None:
            load_ms, loading = self.host_pages.take_ended(self.seq)
        result = StepResult(
            seq=self.seq,
            token_ids=token_ids,
            compute_ms=compute_ms,
            times=times,
            load_ms=load_ms,
            loading=loading,
            pooled=None if self.pooled is None else self.pooled.to_bytes(),
            adapters_read=[] if self.adapters is None else self.adapters.take_ended(),
        )
        if self.blocks is not None:
            return self.blocks.add_to(result)
        if (
            self.reports_logprobs
            and output is not None
            and (output.scores is not None or output.prompt_scores is not None)
        ):
            result = output.add_logprobs(result)
        return result if self.accepted is None else self.accepted.select(result)


_SCORE_TENSORS = ("tokens", "token_logits", "best", "weight", "rank", "top_tokens", "top_logits")


def fetch_output(output: SamplerOutput, slot: StepSlot, *, with_logprobs: bool) -> SamplerOutput:
    """Launches the copy of an output to the host; the returned tensors are valid once the slot's
    step has completed. Without `with_logprobs`, only tokens are copied."""
    tokens = None if output.tokens is None else slot.fetch(output.tokens)
    if not with_logprobs:
        return SamplerOutput(tokens=tokens)
    scores = None if output.scores is None else _fetch_scores(output.scores, slot)
    prompts = None
    if output.prompt_scores is not None:
        prompts = {
            index: [_fetch_scores(block, slot) for block in blocks]
            for index, blocks in output.prompt_scores.items()
        }
    return replace(output, tokens=tokens, scores=scores, prompt_scores=prompts)


def _fetch_scores(scores: Scores, slot: StepSlot) -> Scores:
    fetched = {name: slot.fetch(getattr(scores, name)) for name in _SCORE_TENSORS}
    given = scores.given
    if given is not None:
        given = replace(given, values=slot.fetch(given.values))
    return Scores(num_top=scores.num_top, given=given, **fetched)
