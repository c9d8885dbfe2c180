"""How many of a step's draws count: those up to the first that differs from its draft.

Decided here alone, for results and penalties alike: by the host for rows that it has placed, by
the device for others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import torch

from worker.plan.plan import DraftRow, Row, StepResult
from worker.rank.speculation.placement import Placement
from worker.rank.streams import StepSlot
from worker.rank.transfer import IntArray

NO_ROW = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class HostRows:
    """The F speculative rows of a step, each of which begins with its newest token."""

    first_draws: Sequence[int]
    """[F]: which of the step's draws each row's first is."""
    drafts: Sequence[Sequence[int]]
    """[F]: what each row has behind its newest token."""
    placement: None = None

    def accept(self, tokens: torch.Tensor) -> HostAcceptance:
        """Compares a step's draws, int64 [S], with the drafts, if there are any. Waits for the
        device."""
        if not any(self.drafts):
            return HostAcceptance(counts=[1] * len(self.drafts))
        drawn: list[int] = tokens.tolist()
        return HostAcceptance(
            counts=[
                1 + count_equal(draft, drawn[first : first + len(draft)])
                for first, draft in zip(self.first_draws, self.drafts, strict=True)
            ]
        )

    def accepted_draws(self, acceptance: HostAcceptance, num_draws: int) -> torch.Tensor:
        """Which of the step's S draws count, bool [S]; all of those of other rows do."""
        accepted = torch.ones(num_draws, dtype=torch.bool)
        rows = zip(self.first_draws, self.drafts, acceptance.counts, strict=True)
        for first, draft, count in rows:
            accepted[first + count : first + 1 + len(draft)] = False
        return accepted


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceRows:
    """The F speculative rows of a step, of M positions at most, where the device alone knows where
    they stand."""

    draws: torch.Tensor
    """[F, M] int64: which of the step's draws each position makes; behind a row, its last."""
    expected: torch.Tensor
    """[F, M] int64: the token behind each position, NO_TOKEN for the last of a row."""
    placement: Placement

    def accept(self, tokens: torch.Tensor) -> DeviceAcceptance:
        """Compares a step's draws, int64 [S], with the drafts; nobody waits."""
        offsets = self.placement.newest - self.placement.firsts
        columns = torch.arange(self.draws.shape[1], device=tokens.device)
        # Tokens up to the newest one are known: whatever is drawn for them, the row goes on.
        drawn = torch.where(columns < offsets[:, None], self.expected, tokens[self.draws])
        counts = (drawn == self.expected).cumprod(1).sum(1) + 1 - offsets
        counts = torch.where(offsets < self.placement.lengths, counts, 0)
        return DeviceAcceptance(counts=counts, offsets=offsets)


SpeculativeRows = HostRows | DeviceRows


@dataclass(frozen=True, kw_only=True, slots=True)
class HostAcceptance:
    """How many draws of each speculative row count, from its first on."""

    counts: Sequence[int]
    """[F]."""

    def fetch(self, slot: StepSlot) -> HostAcceptance:
        """The same, which is on the host."""
        return self

    def to_host(self) -> Iterable[tuple[int, int]]:
        """Offset of the first draw that counts, and how many do, of each row."""
        return zip(itertools.repeat(0), self.counts, strict=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceAcceptance:
    """How many draws of each speculative row count, and from which on."""

    counts: torch.Tensor
    """[F] int64."""
    offsets: torch.Tensor
    """[F] int64: the draw of the row that is the first to count."""

    def fetch(self, slot: StepSlot) -> DeviceAcceptance:
        """The same, on the host once the slot's step has completed; does not wait for it."""
        # HAZARD(stream): nothing may be launched here, behind the slot's last launch.
        return DeviceAcceptance(counts=slot.fetch(self.counts), offsets=slot.fetch(self.offsets))

    def to_host(self) -> Iterable[tuple[int, int]]:
        """Offset and count of each row; waits for the device."""
        return zip(self.offsets.tolist(), self.counts.tolist(), strict=True)


Acceptance = HostAcceptance | DeviceAcceptance


def count_equal(guesses: Sequence[int], tokens: Sequence[int]) -> int:
    """Length of the common beginning."""
    count = 0
    for guess, token in zip(guesses, tokens, strict=False):
        if guess != token:
            break
        count += 1
    return count


@dataclass(frozen=True, kw_only=True, slots=True)
class AcceptedTokens:
    """Which tokens of a step count, on the host or on their way there."""

    rows: Sequence[Row]
    """Rows as they were computed."""
    row_of: Sequence[int]
    """Places in `rows` by row of the Plan, or NO_ROW where there was nothing to compute."""
    acceptance: Acceptance | None
    """None where no speculative row was computed."""

    def fetch(self, slot: StepSlot) -> AcceptedTokens:
        """Fetches these tokens: they are on the host once the slot's step has completed; does not
        wait for it."""
        if self.acceptance is None:
            return self
        return replace(self, acceptance=self.acceptance.fetch(slot))

    def select(self, result: StepResult) -> StepResult:
        """The result of the tokens that count, from that of all draws."""
        found = iter(() if self.acceptance is None else self.acceptance.to_host())
        kept: list[int] = []
        drafted: list[int] = []
        accepted: list[int] = []
        draw = 0
        for number in self.row_of:
            if number == NO_ROW:
                drafted.append(0)
                accepted.append(0)
                continue
            row = self.rows[number]
            offset, count = 0, row.num_draws
            if isinstance(row, DraftRow):
                offset, count = next(found)
                drafted.append(max(0, row.length - 1 - offset))
                accepted.append(count)
            kept += range(draw + offset, draw + offset + count)
            draw += row.num_draws
        logprobs, prompts = result.logprobs, result.prompt_logprobs
        if prompts is not None:
            planned = {number: row for row, number in enumerate(self.row_of)}
            prompts = {planned[number]: scored for number, scored in prompts.items()}
        return msgspec.structs.replace(
            result,
            token_ids=[result.token_ids[draw] for draw in kept],
            logprobs=None if logprobs is None else [logprobs[draw] for draw in kept],
            prompt_logprobs=prompts,
            drafted=drafted,
            drawn=accepted,
        )


def draws_of_rows(rows: Sequence[Row]) -> IntArray:
    """Which of a step's draws the positions of its F speculative rows make, as in DeviceRows.

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
