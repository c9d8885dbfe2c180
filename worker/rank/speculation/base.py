"""The seam between proposing drafts and verifying them, on every rank.

    place     speculative rows ──their newest tokens──> Proposer ──drafts──> rows of known length
    forward   all their positions at once
    sample    at every position what plain decoding would draw there
    accept    a row's draws up to the first that differs from its draft

Ranks draft by themselves, since only they know in time what the step before drew. They draft alike:
a proposer is a function of tokens, weights and keyed noise. What is drafted decides how many tokens
a step yields and never which.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import ClassVar, NamedTuple, Protocol

from worker.plan.plan import DraftRow
from worker.rank.speculation.calibration import Calibration
from worker.rank.speculation.placement import Placement


class DraftRequest(NamedTuple):
    """One row that may draft."""

    slot: int
    num_tokens: int
    """Tokens of the request so far, which the token pool holds: drafts are to follow the last."""
    num_drafts: int
    """Most drafts; at least 1."""


class Guesses(NamedTuple):
    """A proposer's guesses for one request's next tokens."""

    token_ids: list[int]
    levels: list[int]
    """Level of each guess, see Calibration."""
    num_drafts: int
    """How many of them, from the first on, are worth verifying."""

    @property
    def drafts(self) -> list[int]:
        """The guesses that are to be verified."""
        return self.token_ids[: self.num_drafts]

    def up_to(self, end_token_ids: Collection[int]) -> Guesses:
        """The guesses with drafts up to, not including, one that ends the request: the draw in its
        place needs no draft, and nothing behind it counts."""
        for number, token_id in enumerate(self.drafts):
            if token_id in end_token_ids:
                return self._replace(num_drafts=number)
        return self


NO_GUESSES = Guesses([], [], 0)


class DeviceProposer(Protocol):
    """Guesses where the device alone knows how far requests have come."""

    def draft(self, placement: Placement, windows: Sequence[DraftRow]) -> None:
        """Puts drafts behind the newest tokens, as far as rows reach; nobody waits.

        Args:
            placement: of a step's speculative rows.
            windows: the same, as planned.
        """
        ...


class Proposer(ABC):
    """Guesses how requests go on, and learns from how they did.

    Args:
        calibration: of its guesses.
    """

    needs_pages: ClassVar[bool] = False
    """Whether it reads pages, which the step's Plan may yet have to write."""

    def __init__(self, calibration: Calibration) -> None:
        self.calibration = calibration

    def admit(self, slot: int, end_token_ids: Sequence[int] = ()) -> None:
        """Forgets what it knows of the slot: another request enters it, or the same anew.

        Args:
            slot: the slot.
            end_token_ids: tokens that end the request; no draft behind one counts.
        """
        self.calibration.admit(slot)

    @abstractmethod
    def propose(self, requests: Sequence[DraftRequest], threshold: float) -> list[Guesses]:
        """Guesses for each request, of which those that are worth their cost are drafts.

        Args:
            requests: in the order of the step's rows.
            threshold: see `Plan.draft_threshold`.
        """

    def observe(self, slot: int, guesses: Guesses, num_right: int, num_known: int) -> None:
        """Takes the outcome of the guesses that were proposed last for a slot.

        Args:
            slot: the slot.
            guesses: as they were proposed.
            num_right: how many are right, up to the first that is not.
            num_known: in place of how many the token is known.
        """
        self.calibration.observe(slot, guesses.levels, num_right, num_known)
