"""Interface between proposing drafts and verifying them, on every rank.

    propose   speculative rows ──newest tokens──> Proposer ──drafts──> rows of known length
    forward   all positions of these rows at once
    sample    at each position, the token that decoding without drafts would sample there
    accept    a row's samples up to and including the first that differs from its draft

Each rank drafts independently, since only the ranks have the previous step's tokens in time. All
ranks produce the same drafts: a proposer is a function of tokens, weights and keyed noise. Drafts
affect the number of tokens per step, never the tokens themselves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import ClassVar, NamedTuple, Protocol

from worker.plan.plan import DraftRow
from worker.rank.placement import DevicePlacement
from worker.rank.speculation.calibration import Calibration

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Captures the launches of a function; returns a function that replays them."""


class DraftRequest(NamedTuple):
    """A speculative row that needs drafts."""

    slot: int
    num_tokens: int
    """Number of tokens of the request so far, which are in the token pool; drafts follow the last
    one."""
    num_drafts: int
    """Maximum number of drafts; at least 1."""


class Guesses(NamedTuple):
    """A proposer's guesses for one request's next tokens."""

    token_ids: list[int]
    levels: list[int]
    """Level of each guess, as defined by Calibration."""
    num_drafts: int
    """Number of leading guesses that are worth verifying and become drafts."""

    @property
    def drafts(self) -> list[int]:
        """The guesses that the step verifies."""
        return self.token_ids[: self.num_drafts]

    def up_to(self, end_token_ids: Collection[int]) -> Guesses:
        """The guesses, with drafts only before the first token that ends the request. That token
        can be sampled without a draft, and no draft after it can be accepted."""
        for number, token_id in enumerate(self.drafts):
            if token_id in end_token_ids:
                return self._replace(num_drafts=number)
        return self


NO_GUESSES = Guesses([], [], 0)


class DeviceProposer(Protocol):
    """Drafts on the device, for rows whose positions are not known on the host yet."""

    def draft(self, placement: DevicePlacement, windows: Sequence[DraftRow]) -> None:
        """Writes drafts to the token pool after the newest tokens, up to the ends of the rows; does
        not wait for the device.

        Args:
            placement: positions of a step's speculative rows, on the device.
            windows: the same rows as planned.
        """
        ...


class Proposer(ABC):
    """Guesses the next tokens of requests and adapts to the outcomes.

    Args:
        calibration: estimates the probability that guesses are right.
    """

    needs_pages: ClassVar[bool] = False
    """Whether drafting uses KV pages and therefore needs the Plan's page writes first."""

    def __init__(self, calibration: Calibration) -> None:
        self.calibration = calibration

    def admit(self, slot: int, end_token_ids: Sequence[int] = ()) -> None:
        """Resets the slot's state for a request that is admitted or readmitted.

        Args:
            slot: the request's slot.
            end_token_ids: tokens that end the request; drafts after one are never accepted.
        """
        self.calibration.admit(slot)

    @abstractmethod
    def propose(self, requests: Sequence[DraftRequest], threshold: float) -> list[Guesses]:
        """Guesses for each request, and the number that become drafts.

        Args:
            requests: requests in the order of the step's rows.
            threshold: minimum acceptance probability of a draft, `Plan.draft_threshold`.
        """

    def observe(self, slot: int, guesses: Guesses, num_right: int, num_known: int) -> None:
        """Updates estimates with the outcome of the latest guesses for a slot.

        Args:
            slot: the request's slot.
            guesses: the guesses as proposed.
            num_right: number of leading guesses that are right.
            num_known: number of leading guesses whose true token is known.
        """
        self.calibration.observe(slot, guesses.levels, num_right, num_known)
