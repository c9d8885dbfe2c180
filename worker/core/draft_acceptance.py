"""Acceptance records of drafts: per request, and over all requests per size of batch."""

from __future__ import annotations

import math

from worker.protocol.messages import StepShape
from worker.protocol.step_time import StepCosts

REQUEST_ROWS = 20.0
"""Memory of a request's record, in rows: acceptance varies much from row to row."""
COMMON_ROWS, RARE_ROWS = 50.0, 10.0
"""Memory of the records over all requests, in rows; each row of a kind that seldom drafts stands
for more, as if the memory were the second."""
PRIOR_DRAFTS, PRIOR_ROWS = 8.0, 2.0
"""Weight of a request's priors: of the rate in drafts, about one row's, and of the gain in rows."""
FIRST_GAIN = 0.5
"""Prior gain of a row in tokens, before any has drafted: enough to try."""
FIRST_WAIT, LONGEST_WAIT = 4, 512
"""Steps before a request whose drafts were wrong tries again: at first, and at most."""


class CommonGain:
    """Running mean of the gain of rows that may draft, over all requests: tokens beyond the
    cost."""

    __slots__ = ("mean", "variance")

    def __init__(self) -> None:
        self.mean = FIRST_GAIN
        self.variance = 1.0

    def observe(self, gain: float, *, is_rare: bool) -> None:
        """Takes one row's gain; `is_rare` where most rows like it were not tried."""
        weight = 1.0 / (RARE_ROWS if is_rare else COMMON_ROWS)
        difference = gain - self.mean
        self.mean += weight * difference
        self.variance += weight * (difference**2 - self.variance)

    @property
    def lower(self) -> float:
        """The mean less about a standard error: above zero it is hardly chance."""
        return self.mean - math.sqrt(self.variance / COMMON_ROWS)


class BatchRecord:
    """Throughput and gain of steps with about the same number of decoding requests."""

    __slots__ = ("_seconds", "_tokens", "gain", "num_with_drafts")

    def __init__(self) -> None:
        self.gain = CommonGain()
        self.num_with_drafts = 0
        """Steps since one that had a row without drafts."""
        self._tokens = self._seconds = 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Takes one step: its tokens, and its predicted seconds without prompts."""
        keep = 1.0 - 1.0 / COMMON_ROWS
        self._tokens = keep * self._tokens + num_tokens
        self._seconds = keep * self._seconds + seconds

    def tokens_per_s(self, costs: StepCosts, num_rows: int) -> float:
        """Tokens per second of these steps; before the first, the prediction without drafts."""
        if self._seconds:
            return self._tokens / self._seconds
        return num_rows / max(costs.step(StepShape(decode_rows=num_rows)), 1e-9)


class RequestRecord:
    """Acceptance and gain of one request's drafts, with forgetting.

    Args:
        rate: prior of the acceptance rate, before any draft of the request.
        common: gain over all requests, the prior of this request's.
        step: number of the present step.
    """

    __slots__ = (
        *("_accepted", "_gained", "_idle_since", "_rows", "_squared", "_trials", "_wait"),
        *("_expected_rate", "has_drafted", "is_trying"),
    )

    def __init__(self, rate: float, common: CommonGain, step: int) -> None:
        self._accepted = self._trials = 0.0
        self._gained = self._squared = self._rows = 0.0
        self._expected_rate = rate
        self._expect(rate, common)
        self._wait = FIRST_WAIT
        self._idle_since = step
        self.has_drafted = False
        """Whether any row of the request was allowed to draft."""
        self.is_trying = False
        """Whether the request drafts as a probe, though no gain is expected."""

    @property
    def rate(self) -> float:
        """Acceptance rate: probability that a draft is accepted, given that all before it were."""
        accepted = self._accepted + PRIOR_DRAFTS * self._expected_rate
        return accepted / (self._trials + PRIOR_DRAFTS)

    @property
    def gain(self) -> float:
        """Mean tokens that a row of this request gains beyond the cost of its drafts."""
        return self._gained / self._rows

    @property
    def upper_gain(self) -> float:
        """Gain plus one standard error: a loss is hardly chance where this is below zero."""
        return self.gain + self._error

    @property
    def lower_gain(self) -> float:
        """Gain less one standard error: one row with many accepted drafts is not enough."""
        return self.gain - self._error

    @property
    def _error(self) -> float:
        variance = max(0.0, self._squared / self._rows - self.gain**2)
        return math.sqrt(variance / self._rows)

    def observe(self, num_drafts: int, num_accepted: int, gain: float, step: int) -> None:
        """Takes the outcome of one row that was allowed to draft.

        Args:
            num_drafts: drafts of the row; 0 where the proposer had none.
            num_accepted: drafts before the first that was rejected.
            gain: accepted tokens less those that the drafts' time would have yielded.
            step: number of the present step.
        """
        keep = 1.0 - 1.0 / REQUEST_ROWS
        self._idle_since = step
        self.has_drafted = True
        self.is_trying = False
        self._gained = self._gained * keep + gain
        self._squared = self._squared * keep + gain**2
        self._rows = self._rows * keep + 1.0
        if num_drafts:
            self._accepted = self._accepted * keep + num_accepted
            self._trials = self._trials * keep + num_accepted + (num_accepted < num_drafts)
        if num_accepted:
            self._wait = FIRST_WAIT

    def is_due(self, step: int) -> bool:
        """Whether the request has not drafted for so long that it is time to try again."""
        return step - self._idle_since >= self._wait

    def try_again(self, rate: float, common: CommonGain, step: int) -> None:
        """Begins a probe with fresh priors. The wait until the next doubles, up to a bound, until a
        draft is accepted."""
        self._idle_since = step
        self._wait = min(2 * self._wait, LONGEST_WAIT)
        self._expect(rate, common)
        self.is_trying = True

    def _expect(self, rate: float, common: CommonGain) -> None:
        self._expected_rate = rate
        self._accepted = self._trials = 0.0
        self._gained, self._rows = common.mean * PRIOR_ROWS, PRIOR_ROWS
        self._squared = (common.variance + common.mean**2) * PRIOR_ROWS


def size_class(num_rows: int) -> int:
    """Class of a batch size: sizes up to 8 each have their own, larger ones differ by a fifth."""
    return num_rows if num_rows <= 8 else 8 + round(4 * math.log2(num_rows / 8))
