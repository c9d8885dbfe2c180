"""How long each step may take before its ranks count as hung."""

from __future__ import annotations

from worker.core.step_forecast import StepForecast
from worker.wire.messages import StepShape

FACTOR = 20.0
"""Times the predicted duration: twice for the model's error, ten times for a machine that others
use as well."""
FIRST_FACTOR = 6.0
"""Times the timeout, for a step unlike any before: kernels that are first needed in it are compiled
meanwhile, some seconds each and a handful per model, so a minute of the usual ten seconds."""


class StepLimits:
    """Says of the next step when it is overdue.

    Args:
        timeout_s: that every step has.
        forecast: says what it should take.
    """

    def __init__(self, timeout_s: float, forecast: StepForecast) -> None:
        self.timeout_s = timeout_s
        self._forecast = forecast

    def of(self, shape: StepShape, num_passes: int = 1) -> float:
        """Seconds for a step.

        Args:
            shape: what it is to compute.
            num_passes: forward passes that it may take, each of such a shape.
        """
        limit = max(self.timeout_s, FACTOR * num_passes * self._forecast.step_s(shape))
        if self._forecast.is_unlike_any(shape):
            return max(limit, FIRST_FACTOR * self.timeout_s)
        return limit
