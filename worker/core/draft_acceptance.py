"""Acceptance statistics of drafts: per request, and over all requests, by batch size."""

from __future__ import annotations

import math

from worker.protocol.messages import StepShape
from worker.protocol.step_time import StepCosts

REQUEST_ROWS = 20.0
"""Window of a request's statistics, in rows. Short windows are noisy, since acceptance varies a
lot from row to row."""
COMMON_ROWS, RARE_ROWS = 50.0, 10.0
"""Window of the statistics over all requests, in rows; the second applies to rows of a kind that
rarely drafts, so that each of them counts more."""
PRIOR_DRAFTS, PRIOR_ROWS = 8.0, 2.0
"""Weights of a request's priors: for the rate, in drafts (about one row); for the gain, in rows."""
FIRST_GAIN = 0.5
"""Prior of a row's gain, in tokens, before any drafts: large enough that requests try drafting."""
FIRST_WAIT, LONGEST_WAIT = 4, 512
"""Initial and maximum number of steps until a request whose drafts were rejected drafts again."""


class CommonGain:
    """Running mean, over all requests, of the gain (accepted tokens minus cost) of rows that were
    allowed to draft."""

    __slots__ = ("mean", "variance")

    def __init__(self) -> None:
        self.mean = FIRST_GAIN
        self.variance = 1.0

    def observe(self, gain: float, *, is_rare: bool) -> None:
        """Adds one row's gain. `is_rare` marks a row that drafted as a probe, while most similar
        rows did not."""
        weight = 1.0 / (RARE_ROWS if is_rare else COMMON_ROWS)
        difference = gain - self.mean
        self.mean += weight * difference
        self.variance += weight * (difference**2 - self.variance)

    @property
    def lower(self) -> float:
        """Mean minus about one standard error: a positive value is unlikely to be chance."""
        return self.mean - math.sqrt(self.variance / COMMON_ROWS)


class BatchRecord:
    """Throughput and gain of steps with a similar number of decoding requests."""

    __slots__ = ("_seconds", "_tokens", "gain", "num_with_drafts")

    def __init__(self) -> None:
        self.gain = CommonGain()
        self.num_with_drafts = 0
        """Number of consecutive steps, up to the latest one, in which all rows had drafts."""
        self._tokens = self._seconds = 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Adds one step.

        Args:
            num_tokens: number of tokens generated.
            seconds: predicted duration of the step, excluding prefill.
        """
        keep = 1.0 - 1.0 / COMMON_ROWS
        self._tokens = keep * self._tokens + num_tokens
        self._seconds = keep * self._seconds + seconds

    def tokens_per_s(self, costs: StepCosts, num_rows: int) -> float:
        """Tokens per second in the recorded steps; before the first one, the predicted rate without
        drafts."""
        if self._seconds:
            return self._tokens / self._seconds
        return num_rows / max(costs.step(StepShape(decode_rows=num_rows)), 1e-9)


class RequestRecord:
    """Acceptance and gain of one request's drafts, exponentially weighted.

    Args:
        rate: prior of the acceptance rate.
        common: gain over all requests, the prior of this request's gain.
        step: number of the current step.
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
        """Whether the request drafts as a probe, although no gain is expected."""

    @property
    def rate(self) -> float:
        """Acceptance rate: probability that a draft token is accepted if all earlier ones were."""
        accepted = self._accepted + PRIOR_DRAFTS * self._expected_rate
        return accepted / (self._trials + PRIOR_DRAFTS)

    @property
    def gain(self) -> float:
        """Mean gain per row of this request, in tokens, net of the cost of its drafts."""
        return self._gained / self._rows

    @property
    def upper_gain(self) -> float:
        """Gain plus one standard error: if this is negative, a loss is unlikely to be chance."""
        return self.gain + self._error

    @property
    def lower_gain(self) -> float:
        """Gain minus one standard error: a single row with many accepted drafts does not make it
        positive."""
        return self.gain - self._error

    @property
    def _error(self) -> float:
        variance = max(0.0, self._squared / self._rows - self.gain**2)
        return math.sqrt(variance / self._rows)

    def observe(self, num_drafts: int, num_accepted: int, gain: float, step: int) -> None:
        """Records the outcome of one row that was allowed to draft.

        Args:
            num_drafts: draft tokens of the row; 0 if the proposer had none.
            num_accepted: draft tokens before the first rejected one.
            gain: accepted tokens minus those that could have been generated in the time taken by
                drafts.
            step: number of the current step.
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
        """Whether a request that has not drafted for a while should start a probe."""
        return step - self._idle_since >= self._wait

    def try_again(self, rate: float, common: CommonGain, step: int) -> None:
        """Starts a probe with fresh priors. The wait until the next probe doubles, up to a limit,
        until a draft is accepted."""
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
    """Class of a batch size: one class per size up to 8; beyond that, each class is about a fifth
    larger than the one before."""
    return num_rows if num_rows <= 8 else 8 + round(4 * math.log2(num_rows / 8))
