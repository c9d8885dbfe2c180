"""Canvas decoder: runs the rounds of a Plan's canvases on one rank (DiffusionGemma).

A canvas begins with random tokens. A round computes all its positions bidirectionally, samples
tokens at a temperature that falls from round to round, keeps the samples of the positions with the
lowest entropies, and replaces the others with new random tokens (transformers'
EntropyBoundSampler). A canvas is finished, with the most likely tokens, after its last round, or
earlier after a round with low entropy whose most likely tokens are the same as in the rounds before
it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from kernels import sample_tokens
from worker.config import EngineConfig
from worker.models.config.model_config import ModelConfig
from worker.plan.plan import Admit, BlockOutcome, BlockRow, Plan, PlannedRow, Row
from worker.protocol.diffusion import DiffusionParams
from worker.protocol.messages import TokenLogprobs
from worker.rank.diffusion.proposal import random_positions
from worker.rank.diffusion.results import BlockResults
from worker.rank.sampling.logprobs import score
from worker.rank.tables import DeviceTables
from worker.rank.transfer import to_device

Forward = Callable[[Plan, torch.Tensor], torch.Tensor]
"""Runs a Plan's canvases with their signal [T, hidden]; returns their hidden states [T, hidden]."""
Transform = Callable[[torch.Tensor], torch.Tensor]
"""Function that computes a row of the result for each row of a tensor."""
_Words = npt.NDArray[np.uint64]
_MIN_LOGIT: Final = -3e4
"""Lower bound on logits: finite in fp16, and so low that its exp() is 0. If logits processors
exclude all tokens of a position, infinite logits would make the signal of the whole canvas NaN."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CanvasStep:
    """A Plan with rows of known tokens and of canvases."""

    plan: Plan
    """The Plan with its rows split into known tokens, which come first, and canvases. No row
    samples by itself: canvases are sampled in `CanvasDecoder.run`."""
    canvases: Sequence[BlockRow] = ()
    """Canvases of the Plan."""
    logits_indices: torch.Tensor | None = None
    """Indices of the first pass's tokens whose hidden states are needed, which are those of the
    canvases; None if all are needed or there are no rows."""
    signal: torch.Tensor | None = None
    """[C, hidden]: self-conditioning signal of the canvases in the first pass; None if there is
    none."""


@dataclass(kw_only=True, slots=True)
class RunningCanvas:
    """One canvas of a Plan."""

    row: BlockRow
    """Row of the canvas's positions."""
    num_rounds: int = 0
    """Number of rounds in this Plan."""
    is_done: bool = False
    token_ids: list[int] = field(default_factory=list)
    """Tokens of the canvas once it is done; empty before that."""
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    """Log-probabilities of `token_ids`; None for each token if the request does not return any."""


class CanvasDecoder:
    """Runs rounds of canvases. All ranks have the same logits and make the same decisions.

    A canvas only depends on the tokens before it and on its request's parameters: a preempted
    request repeats its canvas from the first round, with the same result.

    HAZARD(invariance): sums over the vocabulary and matmuls with the embedding are computed for
    each canvas separately, so that their shapes do not depend on the batch.

    Args:
        config: the engine's configuration; `dllm.fdfo` is the execution mode.
        model: the model's configuration.
        tables: the rank's tables, from which forward passes read tokens.
        dtype: data type of hidden states.
        forward: runs canvases, whose tokens are in the tables.
        score: computes fp32 logits [C, vocab] from hidden states [C, hidden].
        embed: computes averages of embeddings [C, hidden], weighted by distributions over tokens
            [C, vocab].
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        tables: DeviceTables,
        *,
        dtype: torch.dtype,
        forward: Forward,
        score: Transform,
        embed: Transform,
    ) -> None:
        assert model.canvas is not None, "a model without canvases"
        self._canvas, self._vocab_size = model.canvas, model.vocab_size
        self._tables, self._dtype = tables, dtype
        self._forward, self._score, self._embed = forward, score, embed
        self._first_done_first_out = config.dllm.fdfo
        num_slots, length = tables.token_pool.shape[0], model.canvas.length
        self._signals = torch.zeros(
            num_slots, length, model.hidden_size, dtype=dtype, device=tables.device
        )
        """Signal of each slot's next round; zeros before the first one."""
        self._best = torch.zeros(num_slots, length, dtype=torch.int64, device=tables.device)
        """Most likely tokens of each slot's last round."""
        self._num_equal = torch.zeros(num_slots, dtype=torch.int64, device=tables.device)
        """Number of most recent consecutive rounds with the same most likely tokens, by slot."""
        self._starts = np.full(num_slots, -1, dtype=np.int64)
        """First position of each slot's canvas; -1 before the request's first one."""
        self._rounds = np.zeros(num_slots, dtype=np.int64)
        """Completed rounds of each slot's canvas."""
        self._seeds = np.zeros(num_slots, dtype=np.int64)
        self._max_rounds = np.zeros(num_slots, dtype=np.int64)
        self._entropy_bounds = np.zeros(num_slots)
        self._streams_drafts = np.zeros(num_slots, dtype=np.bool_)

    def prepare(self, plan: Plan) -> CanvasStep:
        """Admits the Plan's requests, and writes the tokens of new canvases to the tables.

        No cell is written both here and by the Plan's own writes, which come later: the latter are
        known tokens, and canvases come after them.
        """
        for admit in plan.admits:
            self._admit(admit)
        known, rows = self._split(plan.rows)
        new = [row for row in rows if self._starts[row.slot] != row.start]
        for row in new:
            slot = row.slot
            self._count_last(slot)
            self._starts[slot], self._rounds[slot] = row.start, 0
            self._signals[slot].zero_()
            self._num_equal[slot] = 0
        if new:
            self._write(new, self._random_tokens(new))
        logits_indices = None
        if known:
            num_known = sum(row.length for row in known)
            num_tokens = num_known + len(rows) * self._canvas.length
            logits_indices = torch.arange(num_known, num_tokens, device=self._tables.device)
        plan = msgspec.structs.replace(plan, rows=[*known, *_without_samples(rows)])
        signal = self._signal(rows) if rows else None
        return CanvasStep(plan=plan, canvases=rows, logits_indices=logits_indices, signal=signal)

    def run(
        self, step: CanvasStep, hidden: torch.Tensor | None, masks: bytes = b""
    ) -> BlockResults:
        """Runs the Plan's rounds after their first forward pass; arguments as in BlockDecoder."""
        assert not masks, "canvases with grammars"
        canvases = [RunningCanvas(row=row) for row in step.canvases]
        num_forwards = int(hidden is not None)
        if canvases:
            assert hidden is not None, "the step has rows"
            num_forwards = self._run_rounds(step.plan, canvases, hidden)
        return BlockResults(
            outcomes=[self._outcome(canvas) for canvas in canvases],
            token_ids=[token_id for canvas in canvases for token_id in canvas.token_ids],
            logprobs=[logprobs for canvas in canvases for logprobs in canvas.logprobs],
            num_forwards=num_forwards,
        )

    def _run_rounds(
        self, plan: Plan, canvases: Sequence[RunningCanvas], hidden: torch.Tensor
    ) -> int:
        """Runs rounds until the step ends; returns the number of forward passes.

        With first done, first out (FDFO), the step ends when any canvas is done, or after
        `Plan.max_rounds`. Without it, the step ends when all are done.
        """
        num_forwards = 1
        running = canvases
        while True:
            self._round(running, hidden)
            running = [canvas for canvas in running if not canvas.is_done]
            if not running:
                return num_forwards
            is_any_done = len(running) < len(canvases)
            if self._first_done_first_out and (is_any_done or num_forwards == plan.max_rounds):
                return num_forwards
            rows = [canvas.row for canvas in running]
            hidden = self._forward(
                Plan(plan.seq, [], [], _without_samples(rows)), self._signal(rows)
            )
            num_forwards += 1

    def _round(self, canvases: Sequence[RunningCanvas], hidden: torch.Tensor) -> None:
        """Runs one round of canvases that are not done; waits for the device."""
        rows = [canvas.row for canvas in canvases]
        self._rounds[[row.slot for row in rows]] += 1
        noise, tokens, done = self._random_tokens(rows), [], []
        parts = hidden.split(self._canvas.length)
        for row, part, own in zip(rows, parts, noise, strict=True):
            kept, is_done = self._decide(row, part, own)
            tokens.append(kept)
            done.append(is_done)
        self._write(rows, torch.stack(tokens))
        are_done = torch.stack(done).tolist()
        for canvas, part, is_done in zip(canvases, parts, are_done, strict=True):
            canvas.num_rounds += 1
            canvas.is_done = is_done
            if is_done:
                canvas.token_ids = self._best[canvas.row.slot].tolist()
                canvas.logprobs = self._logprobs(canvas.row.slot, part)

    def _decide(
        self, row: BlockRow, hidden: torch.Tensor, noise: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Decides the next tokens of a canvas, and whether they complete the canvas.

        Args:
            row: the canvas; its round is already counted.
            hidden: [C, hidden]: hidden states of the canvas.
            noise: [C] int64: random tokens.

        Returns:
            Tokens [C] int64, and whether the canvas is done.
        """
        canvas, slot = self._canvas, row.slot
        index, max_rounds = int(self._rounds[slot]) - 1, int(self._max_rounds[slot])
        logits = self._score(hidden)
        is_processed = self._tables.sampling.has_processors(slot)
        if is_processed:
            self._process(row, logits)
        logits /= canvas.temperature(index, max_rounds)
        if is_processed:
            logits.clamp_(min=_MIN_LOGIT)
        # Positions with the lowest entropies keep their samples; others get new random tokens.
        shares = logits.softmax(dim=-1)
        entropy = torch.special.entr(shares).sum(dim=-1)
        ordered, order = entropy.sort(stable=True)
        is_kept = ordered.cumsum(dim=0) - ordered <= self._entropy_bounds[slot]
        best = logits.argmax(dim=-1)
        sampled = self._sample(row, index, logits, best)
        tokens = torch.where(torch.empty_like(is_kept).scatter_(0, order, is_kept), sampled, noise)
        # The canvas is done, with the most likely tokens, when these are the same as in some
        # earlier rounds and the mean entropy is low.
        is_equal = (best == self._best[slot]).all() & (self._num_equal[slot] > 0)
        self._num_equal[slot] = torch.where(is_equal, self._num_equal[slot], 0) + 1
        self._best[slot] = best
        is_done = (self._num_equal[slot] > canvas.stable_rounds) & (
            entropy.mean() < canvas.max_entropy
        )
        is_done |= index + 1 >= max_rounds
        # The next round is conditioned on these logits, rounded to the model's type.
        if self._dtype != torch.float32:
            shares = logits.to(self._dtype).softmax(dim=-1, dtype=torch.float32).to(self._dtype)
        self._signals[slot] = self._embed(shares)
        return torch.where(is_done, best, tokens), is_done

    def _sample(
        self, row: BlockRow, index: int, logits: torch.Tensor, best: torch.Tensor
    ) -> torch.Tensor:
        """Tokens [C] int64 from logits [C, vocab]: samples, or the most likely ones if the request
        is greedy."""
        positions = row.start + np.arange(len(logits))
        slots = np.full(len(logits), row.slot, dtype=np.int64)
        random = random_positions(
            self._tables.sampling, slots, positions, np.full(len(logits), index, dtype=np.int64)
        )
        return best if random is None else sample_tokens(logits, random)

    def _process(self, row: BlockRow, logits: torch.Tensor) -> None:
        """Applies logits processors to logits [C, vocab] in place.

        Penalties at a position count the tokens before its canvas, and those to its left in the
        canvas as computed in this round.
        """
        sampling = self._tables.sampling
        offsets = np.arange(len(logits))
        slots = np.full(len(logits), row.slot, dtype=np.int64)
        processed = sampling.gather_positions(slots, row.start + offsets, offsets)
        assert processed is not None, "the slot has processors"
        sampling.process(logits, processed, self._tables.token_pool)

    def _logprobs(self, slot: int, hidden: torch.Tensor) -> list[TokenLogprobs | None]:
        """Log-probabilities of a finished canvas's tokens in the raw distributions of its last
        round, given that round's hidden states [C, hidden]; None for each token if the request does
        not return any.

        Logits are computed again: keeping them would take C * vocab floats per canvas.
        """
        params = self._tables.sampling.params.get(slot)
        if params is None or params.num_logprobs < 0:
            return [None] * self._canvas.length
        num_top = [params.num_logprobs] * self._canvas.length
        return [*score(self._score(hidden), self._best[slot], num_top).to_host()]

    def _count_last(self, slot: int) -> None:
        """Counts the tokens of a slot's finished canvas for the penalties of the next one. Tokens
        of a request that the Plan admits are counted when it is admitted."""
        sampling = self._tables.sampling
        if self._starts[slot] >= 0 and sampling.has_processors(slot):
            sampling.count_block(slot, self._best[slot].int().cpu().numpy())

    def _random_tokens(self, rows: Sequence[BlockRow]) -> torch.Tensor:
        """Random tokens [R, C] int64 of canvases in their current rounds: before the first round,
        the initial tokens; after round n, the new random tokens of round n."""
        slots = np.array([row.slot for row in rows], dtype=np.int64)
        positions = self._starts[slots, None] + np.arange(self._canvas.length)
        tokens = random_tokens(
            *(self._seeds[slots, None], positions, self._rounds[slots, None]),
            vocab_size=self._vocab_size,
        )
        return to_device(torch.from_numpy(tokens), self._tables.device)

    def _signal(self, rows: Sequence[BlockRow]) -> torch.Tensor:
        """Signal [R * C, hidden] for the canvases' next round."""
        slots = to_device(torch.tensor([row.slot for row in rows]), self._tables.device)
        return self._signals.index_select(0, slots).flatten(0, 1)

    def _write(self, rows: Sequence[BlockRow], tokens: torch.Tensor) -> None:
        """Writes the tokens [R, C] of canvases to the token pool."""
        firsts = np.array([row.slot * self._tables.token_stride + row.start for row in rows])
        cells = (firsts[:, None] + np.arange(self._canvas.length)).reshape(-1)
        self._tables.flat_tokens.index_copy_(
            0, to_device(torch.from_numpy(cells), self._tables.device), tokens.int().flatten()
        )

    def _split(self, rows: Sequence[Row]) -> tuple[list[Row], list[BlockRow]]:
        """Splits rows into rows of known tokens, of which those with one token come first, and rows
        of canvases. In the Plan, a canvas may share a row with the known tokens before it.

        Both kinds of rows are computed in one pass: a layer stores the keys of all tokens before
        any query reads them.
        """
        length = self._canvas.length
        known, canvases = list[Row](), list[BlockRow]()
        for row in rows:
            end = row.start + row.length
            if isinstance(row, BlockRow):
                canvases.append(BlockRow(row.slot, end - length, length))
                end -= length
            if end > row.start:
                known.append(PlannedRow(row.slot, row.start, end - row.start, 0))
        return sorted(known, key=lambda row: row.length > 1), canvases

    def _admit(self, admit: Admit) -> None:
        assert admit.block is not None, "a request of a model with canvases has a BlockAdmit"
        slot, params = admit.slot, admit.block.params or DiffusionParams()
        self._starts[slot], self._seeds[slot] = -1, admit.seed
        self._max_rounds[slot] = params.steps or self._canvas.max_rounds
        bound = params.entropy_bound
        self._entropy_bounds[slot] = self._canvas.entropy_bound if bound is None else bound
        self._streams_drafts[slot] = params.stream_drafts

    def _outcome(self, canvas: RunningCanvas) -> BlockOutcome:
        slot, draft = canvas.row.slot, None
        if self._streams_drafts[slot] and not canvas.is_done:
            draft = self._best[slot].tolist()
        return BlockOutcome(
            num_tokens=self._canvas.length if canvas.is_done else 0,
            is_committed=False,
            num_rounds=canvas.num_rounds,
            num_forwards=canvas.num_rounds,
            draft=draft,
        )


def _without_samples(canvases: Sequence[BlockRow]) -> list[Row]:
    """Rows that only compute the canvases; the tokens of canvases are sampled by the decoder."""
    return [PlannedRow(row.slot, row.start, row.length, 0) for row in canvases]


def signal_bytes(model: ModelConfig, dtype: torch.dtype) -> int:
    """Size of a slot's signal in bytes; 0 for models without canvases."""
    return model.num_ahead * model.hidden_size * dtype.itemsize


def random_tokens(
    seeds: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    rounds: npt.NDArray[np.int64],
    *,
    vocab_size: int,
) -> npt.NDArray[np.int64]:
    """Uniformly distributed tokens, a function of the request's seed, the position and the round.

    The three arrays are broadcast. Each combination is hashed as in SplitMix64 (Steele et al.,
    2014), and the upper 32 bits are scaled to the vocabulary.
    """
    words = _mixed(seeds.astype(np.uint64))
    words = words + positions.astype(np.uint64) * _POSITION + rounds.astype(np.uint64) * _ROUND
    scaled = (_mixed(words) >> np.uint64(32)) * np.uint64(vocab_size)
    return (scaled >> np.uint64(32)).astype(np.int64)


_POSITION, _ROUND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD1342543DE82EF95)
"""Odd factors, so that keys of different positions and rounds differ."""


def _mixed(words: _Words) -> _Words:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: _Words = words ^ (words >> np.uint64(31))
    return mixed
