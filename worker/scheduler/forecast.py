"""When a waiting request could have its first token, from the times of the steps so far."""

from __future__ import annotations

from worker.wire.messages import StepShape
from worker.wire.step_time import StepTimeModel

_SETTLED = 20
"""Steps before which nothing is predicted."""
_SOLVED_EVERY = 16
"""Steps after which the coefficients are solved for again."""


class StepForecast:
    """Feeds a step-time model and asks it.

    Args:
        max_num_batched_tokens: of one step.
    """

    def __init__(self, max_num_batched_tokens: int) -> None:
        self._max_tokens = max_num_batched_tokens
        self._model = StepTimeModel()
        self._costs = self._model.costs
        self._solved_at = 0
        self._last = StepShape()

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Takes one step's duration."""
        self._model.observe(shape, seconds)
        self._last = shape

    def first_token_s(self, num_tokens: int) -> float:
        """Seconds from admission to the first token of a request with so many to compute.

        As many steps as they fill, each with the decodes of the last step beside them.
        """
        count = self._model.num_observations
        if count < _SETTLED:
            return 0.0
        if count - self._solved_at >= _SOLVED_EVERY:
            self._solved_at = count
            self._costs = self._model.costs
        decodes = self._costs.decode(self._last.decode_rows, self._last.decode_context)
        room = max(self._max_tokens - self._last.decode_rows, 1)
        return self._costs.prefill(num_tokens) + -(-num_tokens // room) * decodes
