"""Sampler: argmax for greedy rows, keyed Gumbel noise for the others.

HAZARD(invariance): a row's sample must not depend on other rows. All operations are elementwise
operations, comparisons or integer sums; floating-point sums are avoided, since their order may
depend on the number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch

from kernels import SamplingParameters, sample_tokens
from kernels.native import sample_native
from worker.plan.plan import StepResult
from worker.protocol.messages import TokenLogprobs
from worker.rank.batch import SamplingBatch
from worker.rank.sampling.logprobs import Scores, score
from worker.rank.sampling.masks import MaskRows
from worker.rank.tables import DeviceTables
from worker.rank.transfer import to_device
from worker.rank.verification import Acceptance


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerOutput:
    """Tokens and scores of a launched step, on the device or being copied to the host."""

    tokens: torch.Tensor | None
    """[S] int64: sampled tokens; None if no row samples."""
    acceptance: Acceptance | None = None
    """Accepted tokens of the speculative rows; None if there are no such rows."""
    scores: Scores | None = None
    """Scores of the sampled tokens in `scored_rows`; None if there are none."""
    scored_rows: Sequence[int] = ()
    """Indices of the sampled tokens whose requests return log-probabilities."""
    prompt_scores: dict[int, list[Scores]] | None = None
    """Scores of prompt tokens, by row of the Plan."""

    def add_logprobs(self, result: StepResult) -> StepResult:
        """Adds the requested log-probabilities to a result; waits for the device."""
        if self.scores is not None:
            logprobs: list[TokenLogprobs | None] = [None] * len(result.token_ids)
            for row, scored in zip(self.scored_rows, self.scores.to_host(), strict=True):
                logprobs[row] = scored
            result = msgspec.structs.replace(result, logprobs=logprobs)
        if self.prompt_scores is not None:
            prompts = {
                index: [scored for block in blocks for scored in block.to_host()]
                for index, blocks in self.prompt_scores.items()
            }
            result = msgspec.structs.replace(result, prompt_logprobs=prompts)
        return result


def sample(
    logits: torch.Tensor,
    batch: SamplingBatch,
    tables: DeviceTables,
    masks: MaskRows | None = None,
) -> SamplerOutput:
    """Samples tokens [S] from fp32 logits [S, vocab], and writes them to the token pool, which the
    next step reads. Edits the logits in place.

    The order is vLLM's: grammar, logits processors, then temperature and filters. Scores are
    computed from the raw logits.
    """
    processed, raw = batch.processed, None
    if processed is not None and processed.logprobs is not None:
        raw = logits.index_select(0, processed.logprobs.rows)
    if masks is not None:
        masks.apply(logits, native=tables.native_sampling)
    if processed is not None:
        tables.sampling.process(logits, processed, tables.token_pool)
    tokens = sample_logits(logits, batch.parameters, native=tables.native_sampling)
    acceptance, accepted = None, None
    if batch.speculative is not None:
        acceptance = batch.speculative.accept(tokens)
        if processed is not None:
            accepted = batch.speculative.accepted_samples(acceptance, len(tokens))
    if processed is not None:
        accepted = None if accepted is None else to_device(accepted, tokens.device)
        tables.sampling.count(tokens, processed, accepted)
    tables.flat_tokens.index_copy_(0, batch.destinations, tokens.int())
    if processed is None or processed.logprobs is None or raw is None:
        return SamplerOutput(tokens=tokens, acceptance=acceptance)
    scored = tokens.index_select(0, processed.logprobs.rows)
    return SamplerOutput(
        tokens=tokens,
        acceptance=acceptance,
        scores=score(raw, scored, processed.logprobs.num_top, processed.logprobs.given),
        scored_rows=processed.logprobs.rows_host,
    )


def sample_logits(
    logits: torch.Tensor, parameters: SamplingParameters | None, *, native: bool = False
) -> torch.Tensor:
    """Samples one token per row of fp32 logits [S, vocab]; returns int64 [S].

    Args:
        logits: logits after all edits.
        parameters: sampling parameters of the rows; None if all are greedy.
        native: whether to sample in the compiled CPU library.
    """
    if native:
        return sample_native(logits, parameters)
    if parameters is None:
        return logits.argmax(dim=-1)
    return sample_tokens(logits, parameters)
