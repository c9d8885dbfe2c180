"""Frequency, presence and repetition penalties, from counts that live on the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from worker.engine.transfer import to_device
from worker.scheduler.plan import TokenRules


@dataclass(frozen=True, kw_only=True, slots=True)
class PenaltyRows:
    """The rows of a step's logits that penalties apply to, [n] each."""

    rows: torch.Tensor
    slots: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor
    repetition: torch.Tensor


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

    def apply(self, logits: torch.Tensor, rows: PenaltyRows) -> None:
        """Penalises logits [R, vocab] in place."""
        in_prompt, counts = self._tables()
        count = counts.index_select(0, rows.slots)
        in_output = count > 0
        seen = in_prompt.index_select(0, rows.slots).logical_or_(in_output)
        found = logits.index_select(0, rows.rows)
        repetition = rows.repetition.unsqueeze(1)
        repeated = torch.where(found > 0, found / repetition, found * repetition)
        found = torch.where(seen, repeated, found)
        found -= count * rows.frequency.unsqueeze(1)
        found -= in_output * rows.presence.unsqueeze(1)
        logits.index_copy_(0, rows.rows, found)

    def count(self, tokens: torch.Tensor, rows: PenaltyRows) -> None:
        """Counts the step's draws, [R] int64."""
        _, counts = self._tables()
        drawn = tokens.index_select(0, rows.rows)
        cells = rows.slots * self._vocab_size + drawn
        counts.view(-1).index_add_(0, cells, torch.ones_like(cells, dtype=torch.int32))

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


def gather_penalty_rows(
    asking: list[tuple[int, int, TokenRules]], device: torch.device
) -> PenaltyRows | None:
    """From (row of the logits, slot, rules) of all rows with rules; None where none penalises."""
    found = [entry for entry in asking if penalizes(entry[2])]
    if not found:
        return None
    places = torch.tensor([(row, slot) for row, slot, _ in found]).T.contiguous()
    strengths = torch.tensor(
        [(r.frequency_penalty, r.presence_penalty, r.repetition_penalty) for _, _, r in found]
    ).T.contiguous()
    rows, slots = to_device(places, device).unbind()
    frequency, presence, repetition = to_device(strengths, device).unbind()
    return PenaltyRows(
        rows=rows, slots=slots, frequency=frequency, presence=presence, repetition=repetition
    )
