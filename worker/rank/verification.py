"""Verification of drafts: a row's samples are accepted up to the first that differs from its draft.

Used for results and for penalties: on the host for rows that it placed, else on the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import torch

from worker.plan.plan import DraftRow, Row, StepResult
from worker.rank.placement import DraftPlacement
from worker.rank.streams import StepSlot
from worker.rank.transfer import IntArray

NO_ROW = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class HostRows:
    """F speculative rows of a step, placed by the host: each begins with its newest token."""

    first_samples: Sequence[int]
    """[F]: index of each row's first sample among the step's samples."""
    drafts: Sequence[Sequence[int]]
    """[F]: drafts of each row."""
    placement: None = None

    def accept(self, tokens: torch.Tensor) -> HostAcceptance:
        """Compares a step's sampled tokens, int64 [S], with the drafts; waits for the device if
        there are any."""
        if not any(self.drafts):
            return HostAcceptance(counts=[1] * len(self.drafts))
        sampled: list[int] = tokens.tolist()
        return HostAcceptance(
            counts=[
                1 + count_equal(draft, sampled[first : first + len(draft)])
                for first, draft in zip(self.first_samples, self.drafts, strict=True)
            ]
        )

    def accepted_samples(self, acceptance: HostAcceptance, num_samples: int) -> torch.Tensor:
        """Mask of the step's accepted samples, bool [S], including all samples of other rows."""
        accepted = torch.ones(num_samples, dtype=torch.bool)
        rows = zip(self.first_samples, self.drafts, acceptance.counts, strict=True)
        for first, draft, count in rows:
            accepted[first + count : first + 1 + len(draft)] = False
        return accepted


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceRows:
    """F speculative rows of a step, of at most M positions, placed by the device."""

    samples: torch.Tensor
    """[F, M] int64: index of each position's sample among the step's samples; shorter rows are
    padded with their last sample."""
    expected: torch.Tensor
    """[F, M] int64: the token after each position: a known one or a draft; NO_TOKEN from the row's
    last position on."""
    placement: DraftPlacement

    def accept(self, tokens: torch.Tensor) -> DeviceAcceptance:
        """Compares a step's sampled tokens, int64 [S], with the drafts; does not wait for the
        device."""
        offsets = self.placement.newest - self.placement.firsts
        columns = torch.arange(self.samples.shape[1], device=tokens.device)
        # Tokens up to the newest one are known: samples at their positions count as equal.
        sampled = torch.where(columns < offsets[:, None], self.expected, tokens[self.samples])
        counts = (sampled == self.expected).cumprod(1).sum(1) + 1 - offsets
        counts = torch.where(offsets < self.placement.lengths, counts, 0)
        return DeviceAcceptance(counts=counts, offsets=offsets)


SpeculativeRows = HostRows | DeviceRows


@dataclass(frozen=True, kw_only=True, slots=True)
class HostAcceptance:
    """Number of accepted tokens per speculative row, for rows placed by the host."""

    counts: Sequence[int]
    """[F]: number of accepted tokens."""

    def fetch(self, slot: StepSlot) -> HostAcceptance:
        """This acceptance, which needs no copy to the host."""
        return self

    def to_host(self) -> Iterable[tuple[int, int]]:
        """Offset of the first accepted sample, and number of accepted tokens, per row."""
        return zip(itertools.repeat(0), self.counts, strict=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceAcceptance:
    """First accepted sample and number of accepted tokens per speculative row, for rows placed by
    the device."""

    counts: torch.Tensor
    """[F] int64: number of accepted tokens."""
    offsets: torch.Tensor
    """[F] int64: index within the row of the first accepted sample."""

    def fetch(self, slot: StepSlot) -> DeviceAcceptance:
        """Launches the copy to the host; returns tensors that hold the values once the slot's step
        has completed."""
        # HAZARD(stream): nothing may be launched here, after the slot's last launch.
        return DeviceAcceptance(counts=slot.fetch(self.counts), offsets=slot.fetch(self.offsets))

    def to_host(self) -> Iterable[tuple[int, int]]:
        """Offset of the first accepted sample, and number of accepted tokens, per row; waits for
        the device."""
        return zip(self.offsets.tolist(), self.counts.tolist(), strict=True)


Acceptance = HostAcceptance | DeviceAcceptance


def count_equal(guesses: Sequence[int], tokens: Sequence[int]) -> int:
    """Number of leading guesses that equal the tokens."""
    count = 0
    for guess, token in zip(guesses, tokens, strict=False):
        if guess != token:
            break
        count += 1
    return count


@dataclass(frozen=True, kw_only=True, slots=True)
class AcceptedTokens:
    """Selection of a step's accepted tokens."""

    rows: Sequence[Row]
    """Rows of the placed Plan."""
    row_of: Sequence[int]
    """Rows of the placed Plan, by row of the source Plan; NO_ROW for omitted ones."""
    acceptance: Acceptance | None
    """Acceptance of the speculative rows; None without any."""

    def fetch(self, slot: StepSlot) -> AcceptedTokens:
        """Launches the copy to the host; the returned selection may be used once the slot's step
        has completed."""
        if self.acceptance is None:
            return self
        return replace(self, acceptance=self.acceptance.fetch(slot))

    def select(self, result: StepResult) -> StepResult:
        """Reduces a result of all samples to the accepted tokens."""
        found = iter(() if self.acceptance is None else self.acceptance.to_host())
        kept: list[int] = []
        drafted: list[int] = []
        accepted: list[int] = []
        sample = 0
        for number in self.row_of:
            if number == NO_ROW:
                drafted.append(0)
                accepted.append(0)
                continue
            row = self.rows[number]
            offset, count = 0, row.num_samples
            if isinstance(row, DraftRow):
                offset, count = next(found)
                drafted.append(max(0, row.length - 1 - offset))
                accepted.append(count)
            kept += range(sample + offset, sample + offset + count)
            sample += row.num_samples
        logprobs, prompts = result.logprobs, result.prompt_logprobs
        if prompts is not None:
            planned = {number: row for row, number in enumerate(self.row_of)}
            prompts = {planned[number]: scored for number, scored in prompts.items()}
        return msgspec.structs.replace(
            result,
            token_ids=[result.token_ids[sample] for sample in kept],
            logprobs=None if logprobs is None else [logprobs[sample] for sample in kept],
            prompt_logprobs=prompts,
            drafted=drafted,
            num_sampled=accepted,
        )


def samples_of_rows(rows: Sequence[Row]) -> IntArray:
    """[F, M]: indices of the samples of a step's F speculative rows, as in DeviceRows.

    Args:
        rows: all rows of the step.
    """
    longest = max(row.length for row in rows if isinstance(row, DraftRow))
    samples: list[list[int]] = []
    sample = 0
    for row in rows:
        if isinstance(row, DraftRow):
            last = sample + row.length - 1
            samples.append([*range(sample, last), *[last] * (longest - row.length + 1)])
        sample += row.num_samples
    return np.array(samples, dtype=np.int64)
