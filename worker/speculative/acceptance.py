"""What became of the drafts of a request."""

from __future__ import annotations

_KEEP = 0.9
"""Weight that a row's drafts keep with each later one's: about ten count."""
_FIRST_RATE, _FIRST_TRIALS = 0.8, 2.0
"""Acceptance that is expected before any draft was verified, and its weight in drafts."""
_FIRST_LOOKS = 2.0
"""Rows that the expected gain counts for."""
_FIRST_WAIT, _LONGEST_WAIT = 4, 512


class RequestRecord:
    """Follows one request's drafts, with forgetting.

    Args:
        gain: tokens that a row is expected to gain before any was tried.
    """

    __slots__ = ("_accepted", "_gained", "_looks", "_trials", "_wait", "_waited", "has_looked")

    def __init__(self, gain: float) -> None:
        self._accepted, self._trials = _FIRST_RATE * _FIRST_TRIALS, _FIRST_TRIALS
        self._gained, self._looks = gain * _FIRST_LOOKS, _FIRST_LOOKS
        self._wait = _FIRST_WAIT
        self._waited = 0
        self.has_looked = False
        """Whether it was ever allowed to draft."""

    @property
    def rate(self) -> float:
        """The probability that a draft is accepted, given that all before it in the row were."""
        return self._accepted / self._trials

    @property
    def gain(self) -> float:
        """Tokens that a row gains where it may draft, beyond what its drafts cost."""
        return self._gained / self._looks

    def observe(self, num_drafts: int, num_accepted: int, cost: float) -> None:
        """Takes the outcome of one row that was allowed to draft.

        Args:
            num_drafts: 0 where there was no guess.
            num_accepted: drafts after the first rejected one tell nothing.
            cost: tokens that the time of its drafts would have yielded.
        """
        self.has_looked = True
        self._gained = self._gained * _KEEP + num_accepted - cost
        self._looks = self._looks * _KEEP + 1.0
        if num_drafts:
            self._accepted = self._accepted * _KEEP + num_accepted
            self._trials = self._trials * _KEEP + num_accepted + (num_accepted < num_drafts)
        if num_accepted:
            self._wait = _FIRST_WAIT

    def is_due(self) -> bool:
        """Counts one step without drafts; whether it is time to try again."""
        self._waited += 1
        return self._waited >= self._wait

    def try_again(self, gain: float) -> None:
        """Starts afresh. The wait doubles with each attempt until a draft is accepted."""
        self._waited = 0
        self._wait = min(2 * self._wait, _LONGEST_WAIT)
        self._accepted, self._trials = _FIRST_RATE * _FIRST_TRIALS, _FIRST_TRIALS
        self._gained, self._looks = gain * _FIRST_LOOKS, _FIRST_LOOKS
