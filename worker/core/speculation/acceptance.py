"""What became of drafts: of one request's, and of all requests'."""

from __future__ import annotations

import math

_KEEP = 0.95
"""Weight that a row keeps with each later one: about twenty count, since how many drafts are right
in one varies much."""
_PRIOR_TRIALS = 8.0
"""Drafts that the expected rate counts for, always: a request's own are few."""
_FIRST_LOOKS = 2.0
"""Rows that the expected gain counts for."""
_FIRST_WAIT, _LONGEST_WAIT = 4, 512
_LEARNT_STEP, _RARE_STEP = 0.02, 0.1
"""Weight of the newest row in the gain of all requests; of one that stands for many."""
_FIRST_GAIN = 0.5
_ERROR = 0.15
"""Standard error of the common gain: a row's standard deviation times this."""


class CommonGain:
    """Tokens that a row of any request gains where it may draft, beyond what that costs."""

    __slots__ = ("mean", "variance")

    def __init__(self) -> None:
        self.mean = _FIRST_GAIN
        self.variance = 1.0

    def observe(self, gain: float, *, is_rare: bool) -> None:
        """Takes one row's; `is_rare` where most rows like it were not tried."""
        step = _RARE_STEP if is_rare else _LEARNT_STEP
        difference = gain - self.mean
        self.mean += step * difference
        self.variance += step * (difference**2 - self.variance)

    @property
    def sure(self) -> float:
        """The mean by about a standard error less: above zero it is hardly luck."""
        return self.mean - _ERROR * math.sqrt(self.variance)


class RequestRecord:
    """Follows one request's drafts, with forgetting.

    Args:
        rate: at which its drafts are expected to be accepted before any was tried.
        common: what rows of all requests gain; expected of its rows until then.
        step: number of the present one.
    """

    __slots__ = (
        *("_accepted", "_gained", "_looks", "_silent_since", "_squared", "_trials", "_wait"),
        *("_expected_rate", "has_looked", "is_trying"),
    )

    def __init__(self, rate: float, common: CommonGain, step: int) -> None:
        self._accepted = self._trials = 0.0
        self._gained = self._squared = self._looks = 0.0
        self._expected_rate = rate
        self._expect(rate, common)
        self._wait = _FIRST_WAIT
        self._silent_since = step
        self.has_looked = False
        """Whether it was ever allowed to draft."""
        self.is_trying = False
        """Whether it drafts against what is expected, to see."""

    @property
    def rate(self) -> float:
        """The probability that a draft is accepted, given that all before it in the row were."""
        accepted = self._accepted + _PRIOR_TRIALS * self._expected_rate
        return accepted / (self._trials + _PRIOR_TRIALS)

    @property
    def gain(self) -> float:
        """Tokens that a row gains where it may draft, beyond what that costs."""
        return self._gained / self._looks

    @property
    def most_gain(self) -> float:
        """The same by one standard error more: below zero it is hardly bad luck."""
        return self.gain + self._error

    @property
    def sure_gain(self) -> float:
        """The same by one standard error less: a lucky row does not make it."""
        return self.gain - self._error

    @property
    def _error(self) -> float:
        variance = max(0.0, self._squared / self._looks - self.gain**2)
        return math.sqrt(variance / self._looks)

    def observe(self, num_drafts: int, num_accepted: int, gain: float, step: int) -> None:
        """Takes the outcome of one row that was allowed to draft.

        Args:
            num_drafts: 0 where there was no guess.
            num_accepted: drafts after the first rejected one tell nothing.
            gain: tokens that came of them less those that their time would have yielded.
            step: number of the present one.
        """
        self._silent_since = step
        self.has_looked = True
        self.is_trying = False
        self._gained = self._gained * _KEEP + gain
        self._squared = self._squared * _KEEP + gain**2
        self._looks = self._looks * _KEEP + 1.0
        if num_drafts:
            self._accepted = self._accepted * _KEEP + num_accepted
            self._trials = self._trials * _KEEP + num_accepted + (num_accepted < num_drafts)
        if num_accepted:
            self._wait = _FIRST_WAIT

    def is_due(self, step: int) -> bool:
        """Whether it has been silent for so long that it is time to try again."""
        return step - self._silent_since >= self._wait

    def try_again(self, rate: float, common: CommonGain, step: int) -> None:
        """Starts afresh. The wait doubles with each attempt until a draft is accepted."""
        self._silent_since = step
        self._wait = min(2 * self._wait, _LONGEST_WAIT)
        self._expect(rate, common)
        self.is_trying = True

    def _expect(self, rate: float, common: CommonGain) -> None:
        self._expected_rate = rate
        self._accepted = self._trials = 0.0
        self._gained, self._looks = common.mean * _FIRST_LOOKS, _FIRST_LOOKS
        self._squared = (common.variance + common.mean**2) * _FIRST_LOOKS
