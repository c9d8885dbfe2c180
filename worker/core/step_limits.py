"""How long each step may take before its ranks count as hung."""

from __future__ import annotations

from worker.wire.messages import LoadSnapshot, StepShape
from worker.wire.step_time import StepTimeModel

FACTOR = 20.0
"""Times the predicted duration: twice for the model's error, ten times for a machine that others
use as well."""
FIRST_FACTOR = 6.0
"""Times the timeout, for a step unlike any before: kernels that are first needed in it are compiled
meanwhile, some seconds each and a handful per model, so a minute of the usual ten seconds."""
_SETTLED = 20
"""Steps before which the model predicts little."""
_SOLVED_EVERY = 64
"""Observed steps after which its coefficients are solved for again, in half a millisecond."""
_DECODES = 16
"""Of steps without prompts, which are many and alike, one in so many is observed: it costs 15 us,
and the shortest of them take 100 us."""


class StepLimits:
    """Learns how long steps take, and says of the next one when it is overdue.

    Args:
        timeout_s: that every step has.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._model = StepTimeModel()
        self._costs = self._model.costs
        self._due = _SETTLED
        """Observed steps at which the coefficients are solved for again."""
        self._last = StepShape()
        self._most_tokens = self._most_rows = 0
        """Of prompts, and decoding, in any step so far."""

    def observe(self, load: LoadSnapshot) -> None:
        """Takes the last step that a load tells of, if it is a new one."""
        shape = load.step_shape
        if shape.seq == self._last.seq or load.step_ms <= 0.0:
            return
        observed = bool(shape.prefill_tokens) or shape.seq % _DECODES == 0
        self._last = shape
        self._most_tokens = max(self._most_tokens, shape.prefill_tokens)
        self._most_rows = max(self._most_rows, shape.decode_rows)
        if not observed:
            return
        self._model.observe(shape, load.step_ms / 1e3)
        if self._model.num_observations >= self._due:
            self._due += _SOLVED_EVERY
            self._costs = self._model.costs

    def of(self, shape: StepShape, num_passes: int = 1) -> float:
        """Seconds for a step.

        Args:
            shape: what it is to compute.
            num_passes: forward passes that it may take, each of such a shape.
        """
        limit = max(self.timeout_s, FACTOR * num_passes * self._costs.step(shape))
        if self._is_first(shape):
            return max(limit, FIRST_FACTOR * self.timeout_s)
        return limit

    def _is_first(self, shape: StepShape) -> bool:
        if self._model.num_observations < _SETTLED:
            return True
        return shape.prefill_tokens > self._most_tokens or shape.decode_rows > self._most_rows
