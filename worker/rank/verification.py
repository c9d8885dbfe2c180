"""Verification of drafts: a row's samples are accepted up to and including the first that differs
from its draft.

Results and penalties use the accepted tokens. Rows whose positions the host computed are verified
on the host, all others on the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import torch

from worker.plan.plan import DraftRow, Row, StepResult
from worker.rank.placement import DevicePlacement, HostPlacement
from worker.rank.streams import StepSlot
from worker.rank.transfer import IntArray

NO_ROW = -1


class SpeculativeRows(ABC):
    """F speculative rows of a step: their positions, and the verification of their drafts."""

    placement: HostPlacement | DevicePlacement

    @property
    def on_device(self) -> DevicePlacement | None:
        """Positions of the rows if the device computes them; otherwise None."""
        return self.placement if isinstance(self.placement, DevicePlacement) else None

    @abstractmethod
    def accept(self, tokens: torch.Tensor) -> Acceptance:
        """Compares a step's sampled tokens, int64 [S], with the drafts."""

    @abstractmethod
    def accepted_samples(self, acceptance: Acceptance, num_samples: int) -> torch.Tensor | None:
        """Mask of the step's accepted samples, bool [S] on the host, including all samples of other
        rows; None for rows that the device verifies, which have no logits processors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostRows(SpeculativeRows):
    """Rows that the host verifies; it waits for the device if there are any drafts."""

    placement: HostPlacement

    def accept(self, tokens: torch.Tensor) -> Acceptance:
        """Counts the accepted tokens of each row on the host."""
        drafts, counts = self.placement.drafts, [1] * len(self.placement.drafts)
        if any(drafts):
            sampled: list[int] = tokens.tolist()
            counts = [
                1 + count_equal(draft, sampled[first : first + len(draft)])
                for first, draft in zip(self.placement.first_samples, drafts, strict=True)
            ]
        return Acceptance(counts=np.array(counts), offsets=np.zeros(len(counts), dtype=np.int64))

    def accepted_samples(self, acceptance: Acceptance, num_samples: int) -> torch.Tensor:
        """The mask of accepted samples, from the host's counts."""
        accepted = torch.ones(num_samples, dtype=torch.bool)
        first_samples, drafts = self.placement.first_samples, self.placement.drafts
        for first, draft, count in zip(
            first_samples, drafts, acceptance.counts.tolist(), strict=True
        ):
            accepted[first + count : first + 1 + len(draft)] = False
        return accepted


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceRows(SpeculativeRows):
    """Rows that the device verifies; the host does not wait for it."""

    placement: DevicePlacement
    expected: torch.Tensor
    """[F, M] int64: `tokens_after` of the placement, after its drafts were written."""

    def accept(self, tokens: torch.Tensor) -> Acceptance:
        """Counts the accepted tokens of each row with tensor operations."""
        placement = self.placement
        offsets = placement.newest - placement.firsts
        columns = torch.arange(placement.longest, device=tokens.device)
        # Tokens up to the newest one are known: samples at their positions count as equal.
        is_known = columns < offsets[:, None]
        sampled = torch.where(is_known, self.expected, tokens[placement.samples])
        counts = (sampled == self.expected).cumprod(1).sum(1) + 1 - offsets
        counts = torch.where(offsets < placement.lengths, counts, 0)
        return Acceptance(counts=counts, offsets=offsets)

    def accepted_samples(self, acceptance: Acceptance, num_samples: int) -> None:
        """None, since these rows have no logits processors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Acceptance:
    """First accepted sample and number of accepted tokens per speculative row: arrays on the host
    for rows that the host verifies, otherwise tensors on the device."""

    counts: IntArray | torch.Tensor
    """[F] int64: number of accepted tokens."""
    offsets: IntArray | torch.Tensor
    """[F] int64: index within the row of the first accepted sample."""

    def fetch(self, slot: StepSlot) -> Acceptance:
        """Launches the copy to the host unless the values are already there. The returned tensors
        are valid after the slot's step has completed."""
        # HAZARD(stream): nothing may be launched here, after the slot's last launch.
        if isinstance(self.counts, torch.Tensor) and isinstance(self.offsets, torch.Tensor):
            return Acceptance(counts=slot.fetch(self.counts), offsets=slot.fetch(self.offsets))
        return self

    def to_host(self) -> Iterable[tuple[int, int]]:
        """Offset of the first accepted sample, and number of accepted tokens, per row; waits for
        the device."""
        return zip(self.offsets.tolist(), self.counts.tolist(), strict=True)


def count_equal(guesses: Sequence[int], tokens: Sequence[int]) -> int:
    """Number of leading guesses that are equal to the tokens."""
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
    """Rows of the Plan that was run (`DraftedStep.plan`)."""
    row_of: Sequence[int]
    """Indices in `rows`, by row of the source Plan; NO_ROW for omitted ones."""
    acceptance: Acceptance | None
    """Acceptance of the speculative rows; None if there are none."""

    def fetch(self, slot: StepSlot) -> AcceptedTokens:
        """Launches the copy to the host; the returned selection may be used once the slot's step
        has completed."""
        if self.acceptance is None:
            return self
        return replace(self, acceptance=self.acceptance.fetch(slot))

    def select(self, result: StepResult) -> StepResult:
        """Reduces a result that covers all samples to the accepted tokens."""
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
