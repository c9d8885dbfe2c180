"""Frequency, presence and repetition penalties, from counts that live on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kernels import PenaltyRows, apply_penalties_, count_tokens_
from worker.plan.plan import TokenRules
from worker.rank.transfer import to_device


class Asking(NamedTuple):
    """A row that draws a token by rules."""

    sample: int
    """Row of the logits."""
    slot: int
    end: int
    """Where the new token will stand."""
    rules: TokenRules


class PenaltyTable:
    """Which tokens each slot's prompt holds, and how often its output holds each.

    The sampler itself counts what it draws: when the next step is launched ahead, nobody else
    knows the token yet. A slot is counted anew from its token row on every admission.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._num_rows = num_rows
        # Most servers never see a penalty, so the tables are made for the first one.
        self._in_prompt: torch.Tensor | None = None
        self._counts: torch.Tensor | None = None

    def admit(self, slot: int, token_ids: npt.NDArray[np.int32], num_prompt: int) -> None:
        """Counts the tokens of a request that enters `slot`."""
        in_prompt, counts = self._tables()
        tokens = to_device(torch.from_numpy(token_ids.astype(np.int64)), self._device)
        output = tokens[num_prompt:]
        in_prompt[slot].zero_().index_fill_(0, tokens[:num_prompt], True)
        counts[slot].zero_().index_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def apply(self, logits: torch.Tensor, rows: PenaltyRows, token_pool: torch.Tensor) -> None:
        """Penalises logits [R, vocab] in place, at the tokens that the rows hold: no others."""
        in_prompt, counts = self._tables()
        apply_penalties_(logits, rows, in_prompt, counts, token_pool)

    def count(self, tokens: torch.Tensor, rows: PenaltyRows) -> None:
        """Counts the step's draws, [R] int64."""
        _, counts = self._tables()
        count_tokens_(counts, rows, tokens)

    def _tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._in_prompt is None or self._counts is None:
            shape = (self._num_rows, self._vocab_size)
            self._in_prompt = torch.zeros(shape, dtype=torch.bool, device=self._device)
            self._counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
        return self._in_prompt, self._counts


def penalizes(rules: TokenRules) -> bool:
    """Whether any penalty is other than neutral."""
    return (
        rules.frequency_penalty != 0.0
        or rules.presence_penalty != 0.0
        or rules.repetition_penalty != 1.0
    )


def gather_penalty_rows(asking: Sequence[Asking], device: torch.device) -> PenaltyRows | None:
    """From all rows with rules; None where none penalises."""
    found = [one for one in asking if penalizes(one.rules)]
    if not found:
        return None
    places = torch.tensor([(one.sample, one.slot, one.end) for one in found]).T.contiguous()
    strengths = torch.tensor(
        [
            (one.rules.frequency_penalty, one.rules.presence_penalty, one.rules.repetition_penalty)
            for one in found
        ]
    ).T.contiguous()
    rows, slots, ends = to_device(places, device).unbind()
    frequency, presence, repetition = to_device(strengths, device).unbind()
    return PenaltyRows(
        rows=rows,
        slots=slots,
        ends=ends,
        longest=max(one.end for one in found),
        frequency=frequency,
        presence=presence,
        repetition=repetition,
    )
