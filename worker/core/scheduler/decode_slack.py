"""Decode slack: the time that prefill may take in a step so that decodes meet their targets."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from worker.core.request import Request
from worker.core.scheduler.step import StepInFlight
from worker.core.step_forecast import StepForecast

MAX_STALL = 2.5
"""Maximum duration of a step in multiples of a decode's target, however much slack the decode has:
the longest gap between tokens that a client sees, 250 ms with the default target."""
RESERVE = 0.05
"""Part of a decode's target by which tokens are to come before their deadlines, since predictions
err by a few percent."""
LATE_PART = 0.75
"""Prefill time next to a decode that is late, as a fraction of its target: as much as next to a
decode that is on time and takes a quarter of its target."""


class DecodeSlack:
    """Computes prefill time from the slack of decodes, the time to the deadlines of their tokens.

        first token ──target──> 2nd token due ──target──> 3rd token due …
                    │ tokens that came early │ slack │

    Deadlines are an envelope (FairBatching, arXiv 2510.14392): token n is due n - 1 targets after
    the first. Unlike a limit for each gap between tokens, it allows long chunks of prompts next to
    decodes that were fast before, without exceeding their mean time per token.

    A decode that cannot meet its next deadline even without prefill is late. It no longer limits
    prefills by its deadline: that would not help it, and delay them.

    Args:
        forecast: predicts step times.
    """

    def __init__(self, forecast: StepForecast) -> None:
        self._forecast = forecast

    def prefill_s(
        self,
        decodes: Sequence[Request],
        now: float,
        in_flight: Sequence[StepInFlight],
        default_s: float,
    ) -> float:
        """Seconds that prefill may add to a step with these decodes; infinite for no limit.

        Args:
            decodes: decoding requests of the step.
            now: the scheduler's clock, in seconds.
            in_flight: steps that run before this one.
            default_s: target in seconds per token of requests without one; 0 for none.
        """
        costs = self._forecast.costs
        context = sum(request.num_computed for request in decodes)
        decodes_s = costs.decode(len(decodes), context)
        start = now + sum(costs.step(step.shape) for step in in_flight)
        limit_s = inf
        for request in decodes:
            slo = request.times.slo
            target_s = default_s or inf
            if slo is not None and slo.tpot_ms is not None:
                target_s = slo.tpot_ms / 1e3
            if target_s == inf:
                continue
            left_s = request.times.token_due_s(_num_tokens(request), target_s, start) - start
            if left_s >= decodes_s:
                limit_s = min(limit_s, left_s - RESERVE * target_s, MAX_STALL * target_s)
            else:
                limit_s = min(limit_s, decodes_s + LATE_PART * max(target_s, default_s))
        return max(limit_s - decodes_s, 0.0)


def _num_tokens(request: Request) -> int:
    """Tokens generated so far or in flight."""
    return request.num_output + request.num_placeholders
