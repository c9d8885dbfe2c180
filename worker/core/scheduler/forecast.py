"""When a waiting request could have its first token, from the times of the steps so far."""

from __future__ import annotations

from worker.wire.messages import StepShape
from worker.wire.step_time import StepCosts, StepTimeModel

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

    def prefill_s(self, num_tokens: int, num_cached: int) -> float | None:
        """Seconds to compute so many tokens after others; None before that can be told."""
        if self._model.num_observations < _SETTLED:
            return None
        return self._current_costs().prefill(num_tokens, num_cached)

    def decode_part(self, num_rows: int, context: int, num_prompt_tokens: int) -> float:
        """Part of a step's time that decodes take beside so many tokens of prompts.

        0 if unknown, or if it is less than what any step takes: they would pay that once more in a
        step of their own.

        Args:
            num_rows: requests that decode.
            context: positions that they attend to in all.
            num_prompt_tokens: of the step.
        """
        if self._model.num_observations < _SETTLED:
            return 0.0
        costs = self._current_costs()
        decodes = costs.decode_row * num_rows + costs.context_token * context
        if decodes <= costs.constant:
            return 0.0
        return decodes / (costs.constant + costs.prefill(num_prompt_tokens) + decodes)

    def first_token_s(self, num_tokens: int) -> float:
        """Seconds from admission to the first token of a request with so many to compute.

        As many steps as they fill, each with the decodes of the last step beside them.
        """
        if self._model.num_observations < _SETTLED:
            return 0.0
        costs = self._current_costs()
        decodes = costs.decode(self._last.decode_rows, self._last.decode_context)
        room = max(self._max_tokens - self._last.decode_rows, 1)
        return costs.prefill(num_tokens) + -(-num_tokens // room) * decodes

    def _current_costs(self) -> StepCosts:
        count = self._model.num_observations
        if count - self._solved_at >= _SOLVED_EVERY:
            self._solved_at = count
            self._costs = self._model.costs
        return self._costs
