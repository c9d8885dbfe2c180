"""Sampling state: parameters and logits processors of every slot, which steps gather."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kernels import EditRows, PenaltyRows, SamplingParameters, registry
from kernels.sample_tokens import GREEDY_BELOW
from worker.plan.plan import Admit, LogitsParams
from worker.rank.sampling.logits_processors import (
    PenaltyTable,
    SampledRow,
    TokenEditTable,
    TokenMaskRows,
    TokenMaskTable,
    gather_penalty_rows,
    penalizes,
)
from worker.rank.sampling.logprobs import LogprobRows, PromptChunk, given_tokens
from worker.rank.transfer import IntArray, Tensors, stage, to_device

FILTERS = ("top_k", "top_p", "log_min_p")
"""Sampling parameters that exclude tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessedRows:
    """Rows of one step that need logits processors or log-probabilities."""

    masks: TokenMaskRows | None
    edits: EditRows | None
    penalties: PenaltyRows | None
    logprobs: LogprobRows | None
    prompts: Sequence[PromptChunk]


class SamplingState:
    """Sampling parameters of all slots, on the host, and logits processors, on the device.

    Args:
        num_rows: number of slots, including the dummy slot.
        token_stride: cells per slot in the flat token pool.
        vocab_size: number of tokens that can be sampled.
        device: the rank's device.
    """

    def __init__(
        self, *, num_rows: int, token_stride: int, vocab_size: int, device: torch.device
    ) -> None:
        self.temperature = np.zeros(num_rows, dtype=np.float32)
        self.top_k = np.zeros(num_rows, dtype=np.int64)
        self.top_p = np.ones(num_rows, dtype=np.float32)
        self.log_min_p = np.full(num_rows, -np.inf, dtype=np.float32)
        self.seeds = np.zeros(num_rows, dtype=np.int64)
        self._token_stride = token_stride
        self._device = device
        self._masks = TokenMaskTable(num_rows, vocab_size, device)
        self._edits = TokenEditTable(
            num_rows=num_rows, token_stride=token_stride, vocab_size=vocab_size, device=device
        )
        self._penalties = PenaltyTable(num_rows, vocab_size, device)
        self.params: dict[int, LogitsParams] = {}
        """Parameters by slot, for slots with processors or log-probabilities; steps skip the
        processors' tables while there are none."""

    def admit(self, admit: Admit) -> None:
        """Sets the slot's parameters and processors to those of the request."""
        slot, params = admit.slot, admit.logits_params
        self.temperature[slot] = admit.temperature
        # The most likely token passes every filter.
        is_greedy = admit.temperature < GREEDY_BELOW
        self.top_k[slot] = 0 if is_greedy else max(0, admit.top_k)
        self.top_p[slot] = 1.0 if is_greedy else admit.top_p
        filters = admit.min_p > 0.0 and not is_greedy
        self.log_min_p[slot] = math.log(admit.min_p) if filters else -math.inf
        self.seeds[slot] = admit.seed
        if params is None:
            self.params.pop(slot, None)
            return
        self.params[slot] = params
        self._masks.admit(slot, params)
        self._edits.admit(slot, params)
        if penalizes(params):
            token_ids = np.frombuffer(admit.token_ids, dtype="<i4")
            self._penalties.admit(slot, token_ids, params.num_prompt)

    def has_processors(self, slot: int) -> bool:
        """Whether the slot's request has logits processors or returns log-probabilities."""
        return slot in self.params

    def any_random(self, slots: IntArray) -> bool:
        """Whether any of the slots uses random sampling."""
        return bool((self.temperature[slots] >= GREEDY_BELOW).any())

    def filters(self, slots: IntArray) -> tuple[str, ...]:
        """The FILTERS applied when sampling for the slots: those that any slot uses; with Triton
        kernels, all or none, since each combination would be compiled separately."""
        uses = (self.top_k[slots] > 0, self.top_p[slots] < 1.0, self.log_min_p[slots] > -np.inf)
        used = tuple(name for name, used in zip(FILTERS, uses, strict=True) if used.any())
        return FILTERS if used and registry.uses_triton(self._device) else used

    def columns(self, slots: IntArray, positions: IntArray) -> dict[str, npt.NDArray[Any]]:
        """Arrays [S] of the sampling parameters of `slots`, and `positions` [S], which are those of
        the new tokens."""
        return {
            "positions": positions,
            "seeds": self.seeds[slots],
            "temperature": self.temperature[slots],
            "top_k": self.top_k[slots],
            "top_p": self.top_p[slots],
            "log_min_p": self.log_min_p[slots],
        }

    def parameters(
        self, slots: IntArray, positions: IntArray, *, keys: IntArray | int = 0
    ) -> SamplingParameters | None:
        """Sampling parameters [S] on the device, with `keys` added to the seeds modulo 2**64; None
        if all slots are greedy."""
        if not self.any_random(slots):
            return None
        columns = self.columns(slots, positions)
        columns["seeds"] = columns["seeds"] + keys
        filters = self.filters(slots)
        names = ("positions", "seeds", "temperature", *filters)
        staged = stage({name: columns[name] for name in names}, self._device)
        max_top_k = int(columns["top_k"].max())
        return staged_parameters(staged, staged["positions"], filters, max_top_k)

    def gather(self, table: IntArray) -> ProcessedRows | None:
        """The rows among a step's rows [R, 4] (as in Batch) that need processors or
        log-probabilities; None if there are none."""
        sampled: list[SampledRow] = []
        prompts: list[PromptChunk] = []
        first_token = num_samples = 0
        for index, (slot, start, length, samples) in enumerate(table.tolist()):
            if (params := self.params.get(slot)) is not None:
                prompts += self._prompt_chunk(index, slot, (start, start + length), first_token)
                first = start + length + 1 - samples
                sampled += (
                    SampledRow(num_samples + sample, slot, first + sample, params, sample)
                    for sample in range(samples)
                )
            first_token += length
            num_samples += samples
        if not sampled and not prompts:
            return None
        return self._processed(sampled, prompts)

    def gather_positions(
        self, slots: IntArray, positions: IntArray, num_uncounted: IntArray
    ) -> ProcessedRows | None:
        """Rows of running blocks (block diffusion) that need processors or log-probabilities, in
        the order of their logits; None if there are none.

        Args:
            slots: [S]: slots of the positions' requests.
            positions: [S]: positions of the rows' tokens.
            num_uncounted: [S]: number of positions just before each one whose tokens count for
                penalties but have not been counted yet.
        """
        if not self.params:
            return None
        columns = zip(slots.tolist(), positions.tolist(), num_uncounted.tolist(), strict=True)
        sampled = [
            SampledRow(sample, slot, position, params, uncounted)
            for sample, (slot, position, uncounted) in enumerate(columns)
            if (params := self.params.get(slot)) is not None
        ]
        return self._processed(sampled, ()) if sampled else None

    def process(self, logits: torch.Tensor, rows: ProcessedRows, token_pool: torch.Tensor) -> None:
        """Edits fp32 logits [S, vocab] in place, in vLLM's order."""
        if rows.masks is not None:
            self._masks.apply(logits, rows.masks)
        if rows.edits is not None:
            self._edits.apply(logits, rows.edits, token_pool)
        if rows.penalties is not None:
            self._penalties.apply(logits, rows.penalties, token_pool)

    def count(
        self, tokens: torch.Tensor, rows: ProcessedRows, accepted: torch.Tensor | None = None
    ) -> None:
        """Counts the step's sampled tokens [S] int64 for later penalties; `accepted` as in
        `PenaltyTable.count`."""
        if rows.penalties is not None:
            self._penalties.count(tokens, rows.penalties, accepted)

    def count_block(self, slot: int, token_ids: npt.NDArray[np.int32]) -> None:
        """Counts the tokens of a finished block (block diffusion) for later penalties."""
        params = self.params.get(slot)
        if params is not None and penalizes(params):
            self._penalties.count_block(slot, token_ids)

    def _processed(
        self, sampled: Sequence[SampledRow], prompts: Sequence[PromptChunk]
    ) -> ProcessedRows:
        return ProcessedRows(
            masks=self._masks.gather(sampled),
            edits=self._edits.gather(sampled),
            penalties=gather_penalty_rows(sampled, self._device),
            logprobs=self._logprob_rows(sampled),
            prompts=prompts,
        )

    def _logprob_rows(self, sampled: Sequence[SampledRow]) -> LogprobRows | None:
        scored = [row for row in sampled if row.params.num_logprobs >= 0]
        if not scored:
            return None
        rows = [row.sample for row in scored]
        return LogprobRows(
            rows=to_device(torch.tensor(rows), self._device),
            rows_host=rows,
            num_top=[row.params.num_logprobs for row in scored],
            given=given_tokens([row.params.logprob_token_ids for row in scored], self._device),
        )

    def _prompt_chunk(
        self, index: int, slot: int, span: tuple[int, int], first_token: int
    ) -> list[PromptChunk]:
        """The chunk of prompt positions to score in a row that computes positions [span[0],
        span[1]); empty if there are none."""
        params = self.params[slot]
        # The last prompt position predicts the first output token, not a prompt token.
        length = min(span[1], params.num_prompt - 1) - span[0]
        if params.num_prompt_logprobs < 0 or length <= 0:
            return []
        return [
            PromptChunk(
                index=index,
                first_token=first_token,
                first_target=slot * self._token_stride + span[0] + 1,
                length=length,
                num_top=params.num_prompt_logprobs,
            )
        ]


def staged_parameters(
    staged: Tensors, positions: torch.Tensor, filters: Sequence[str], max_top_k: int
) -> SamplingParameters:
    """Sampling parameters of S samples from arrays on the device.

    Args:
        staged: arrays of `SamplingState.columns`, at least seeds, temperature and `filters`.
        positions: [S] int64: positions of the new tokens.
        filters: those of FILTERS that are applied.
        max_top_k: largest top_k of the samples.
    """
    columns = {name: staged[name] for name in ("temperature", "seeds", *filters)}
    return SamplingParameters(positions=positions, **columns, max_top_k=max_top_k)
