"""What coming steps will take, by those so far: for deadlines, copies, deferral and watchdog."""

from __future__ import annotations

from worker.wire.messages import StepShape
from worker.wire.step_time import StepCosts, StepTimeModel

_MIN_OBSERVATIONS = 20
"""Steps before which nothing is predicted."""
_SOLVED_EVERY = 16, 64
"""Observations after which the coefficients are solved for again, which takes half a millisecond:
at first, and at most."""
_DECODES = 16
"""Of steps without prompts, which are many and alike, one in so many is observed: it costs 15 us,
and the shortest of them take 100 us. At first all are."""


class StepForecast:
    """Feeds an engine's one step-time model and asks it.

    Args:
        max_num_batched_tokens: of one step.
    """

    def __init__(self, max_num_batched_tokens: int) -> None:
        self._max_tokens = max_num_batched_tokens
        self._model = StepTimeModel()
        self._costs: StepCosts = self._model.costs
        self._solve_at = _SOLVED_EVERY[0]
        """Observations at which the coefficients are solved for."""
        self._last = StepShape()
        self._num_sampled = 0
        """Steps with prompts, and one in so many of those without."""
        self._most_prompts = self._most_decodes = 0
        """Prompt tokens, and rows that decode, of any step so far."""

    @property
    def is_ready(self) -> bool:
        """Whether there were steps enough to predict others."""
        return self._model.num_observations >= _MIN_OBSERVATIONS

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Takes the duration of the last step; the same step again is ignored."""
        if shape.seq == self._last.seq or seconds <= 0.0:
            return
        self._last = shape
        self._most_prompts = max(self._most_prompts, shape.prefill_tokens)
        self._most_decodes = max(self._most_decodes, shape.decode_rows)
        is_sampled = shape.prefill_tokens > 0 or shape.seq % _DECODES == 0
        self._num_sampled += is_sampled
        if self.is_ready and not is_sampled:
            return
        self._model.observe(shape, seconds)
        # Here, not where somebody asks: same observations, same predictions.
        count = self._model.num_observations
        if count >= self._solve_at:
            first, most = _SOLVED_EVERY
            self._solve_at = count + min(max(first, count // 4), most)
            self._costs = self._model.costs

    def step_s(self, shape: StepShape) -> float:
        """Seconds for a step; of the first ones, by what is supposed of any engine."""
        return self._costs.step(shape)

    def is_unlike_any(self, shape: StepShape) -> bool:
        """Whether no step so far had so many prompt tokens, or rows that decode.

        True of the first hundreds of steps, in which kernels may still be compiled.
        """
        if self._num_sampled < _MIN_OBSERVATIONS:
            return True
        return shape.prefill_tokens > self._most_prompts or shape.decode_rows > self._most_decodes

    def prefill_s(self, num_tokens: int, num_cached: int) -> float | None:
        """Seconds to compute so many tokens after others; None before that can be told."""
        if not self.is_ready:
            return None
        return self._costs.prefill(num_tokens, num_cached)

    def decode_part(self, num_rows: int, context: int, num_prompt_tokens: int) -> float:
        """Part of a step's time that decodes take beside so many tokens of prompts.

        0 if unknown, or if it is less than what any step takes: they would pay that once more in a
        step of their own.

        Args:
            num_rows: requests that decode.
            context: positions that they attend to in all.
            num_prompt_tokens: of the step.
        """
        if not self.is_ready:
            return 0.0
        costs = self._costs
        decodes = costs.decode_row * num_rows + costs.context_token * context
        if decodes <= costs.constant:
            return 0.0
        return decodes / (costs.constant + costs.prefill(num_prompt_tokens) + decodes)

    def first_token_s(self, num_tokens: int) -> float:
        """Seconds from admission to the first token of a request with so many to compute.

        As many steps as they fill, each with the decodes of the last step beside them.
        """
        if not self.is_ready:
            return 0.0
        costs = self._costs
        decodes = costs.decode(self._last.decode_rows, self._last.decode_context)
        room = max(self._max_tokens - self._last.decode_rows, 1)
        return costs.prefill(num_tokens) + -(-num_tokens // room) * decodes
