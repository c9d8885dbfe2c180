"""How many of a step's draws count: those up to the first that differs from its draft.

Decided here alone: by the host for rows that it has placed, by the device for others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from worker.plan.plan import DraftRow, Row, StepResult
from worker.rank.speculation.placement import Placement
from worker.rank.streams import StepSlot
from worker.rank.transfer import IntArray

NO_ROW = -1


Array = TypeVar("Array", torch.Tensor, npt.NDArray[Any])


@dataclass(frozen=True, kw_only=True, slots=True)
class HostRows:
    """The F speculative rows of a step, of M positions at most, each of which begins with its
    newest token."""

    draws: IntArray
    """[F, M]: which of the step's draws each position makes; behind a row, its last."""
    expected: IntArray
    """[F, M]: the draft that follows each position, NO_TOKEN where none does."""
    placement: None = None

    def accept(self, tokens: torch.Tensor) -> Acceptance:
        """Compares a step's draws, int64 [S], with the drafts, if there are any. Waits for the
        device."""
        if self.draws.shape[1] == 1:
            return Acceptance(counts=torch.ones(len(self.draws), dtype=torch.int64))
        drawn = tokens.cpu().numpy()[self.draws]
        return Acceptance(counts=torch.from_numpy(count_accepted(drawn, self.expected)))

    def accepted_draws(self, acceptance: Acceptance, num_draws: int) -> torch.Tensor:
        """Which of the step's S draws count, bool [S]; all of those of other rows do."""
        accepted = torch.ones(num_draws, dtype=torch.bool)
        firsts, lasts = self.draws[:, 0].tolist(), self.draws[:, -1].tolist()
        for first, last, count in zip(firsts, lasts, acceptance.counts.tolist(), strict=True):
            accepted[first + count : last + 1] = False
        return accepted


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceRows:
    """The F speculative rows of a step, of M positions at most, where the device alone knows where
    they stand."""

    draws: torch.Tensor
    """[F, M] int64, as in HostRows."""
    expected: torch.Tensor
    """[F, M] int64: the token behind each position, NO_TOKEN for the last of a row."""
    placement: Placement

    def accept(self, tokens: torch.Tensor) -> Acceptance:
        """Compares a step's draws, int64 [S], with the drafts; nobody waits."""
        offsets = self.placement.newest - self.placement.firsts
        places = torch.arange(self.draws.shape[1], device=tokens.device)
        # Tokens up to the newest one are known: whatever is drawn for them, the row goes on.
        drawn = torch.where(places < offsets[:, None], self.expected, tokens[self.draws])
        counts = count_accepted(drawn, self.expected) - offsets
        counts = torch.where(offsets < self.placement.lengths, counts, 0)
        return Acceptance(counts=counts, offsets=offsets)


SpeculativeRows = HostRows | DeviceRows


@dataclass(frozen=True, kw_only=True, slots=True)
class Acceptance:
    """How many draws of each speculative row count, and from which on."""

    counts: torch.Tensor
    """[F] int64."""
    offsets: torch.Tensor | None = None
    """[F] int64: the draw of the row that is the first to count; None where all begin with it."""

    def to_host(self) -> Iterable[tuple[int, int]]:
        """Offset and count of each row; waits for the device."""
        offsets = itertools.repeat(0) if self.offsets is None else self.offsets.tolist()
        return zip(offsets, self.counts.tolist(), strict=False)


def count_accepted(drawn: Array, expected: Array) -> Array:
    """How many draws count, [F], of rows that begin with their newest tokens.

    Args:
        drawn: [F, M], in the order of positions.
        expected: [F, M]: what must be drawn for the next draw to count, too.
    """
    counts: Array = (drawn == expected).cumprod(1).sum(1) + 1
    return counts


@dataclass(frozen=True, kw_only=True, slots=True)
class AcceptedTokens:
    """Which tokens of a step count, on the host or on their way there."""

    rows: Sequence[Row]
    """As they were computed."""
    row_of: Sequence[int]
    """By row of the Plan: the one of `rows`, or NO_ROW where there was nothing to compute."""
    acceptance: Acceptance | None
    """None where no speculative row was computed."""

    def fetch(self, slot: StepSlot) -> AcceptedTokens:
        """These tokens, on the host once the slot's step has completed; does not wait for it."""
        if self.acceptance is None or self.acceptance.offsets is None:
            return self
        # HAZARD(stream): nothing may be launched here, behind the slot's last launch.
        counts, offsets = self.acceptance.counts, self.acceptance.offsets
        fetched = Acceptance(counts=slot.fetch(counts), offsets=slot.fetch(offsets))
        return replace(self, acceptance=fetched)

    def select(self, result: StepResult) -> StepResult:
        """The result of the tokens that count, from that of all draws."""
        found = iter(() if self.acceptance is None else self.acceptance.to_host())
        kept: list[int] = []
        drafted: list[int] = []
        accepted: list[int] = []
        draw = 0
        for place in self.row_of:
            if place == NO_ROW:
                drafted.append(0)
                accepted.append(0)
                continue
            row = self.rows[place]
            offset, count = 0, row.num_draws
            if isinstance(row, DraftRow):
                offset, count = next(found)
                drafted.append(max(0, row.length - 1 - offset))
                accepted.append(count)
            kept += range(draw + offset, draw + offset + count)
            draw += row.num_draws
        logprobs, prompts = result.logprobs, result.prompt_logprobs
        if prompts is not None:
            planned = {place: row for row, place in enumerate(self.row_of)}
            prompts = {planned[place]: scored for place, scored in prompts.items()}
        return msgspec.structs.replace(
            result,
            token_ids=[result.token_ids[draw] for draw in kept],
            logprobs=None if logprobs is None else [logprobs[draw] for draw in kept],
            prompt_logprobs=prompts,
            drafted=drafted,
            drawn=accepted,
        )


def draws_of_rows(rows: Sequence[Row]) -> IntArray:
    """Which of a step's draws the positions of its F speculative rows make, as in SpeculativeRows.

    Args:
        rows: of the step.
    """
    longest = max(row.length for row in rows if isinstance(row, DraftRow))
    draws: list[list[int]] = []
    draw = 0
    for row in rows:
        if isinstance(row, DraftRow):
            last = draw + row.length - 1
            draws.append([*range(draw, last), *[last] * (longest - row.length + 1)])
        draw += row.num_draws
    return np.array(draws, dtype=np.int64)
