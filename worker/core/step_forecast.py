"""What coming steps will take, by those so far: for deadlines, copies, deferral, drafts and the
watchdog."""

from __future__ import annotations

import math

from worker.wire.messages import StepShape
from worker.wire.step_time import StepCosts, StepTimeModel

_MIN_OBSERVATIONS = 20
"""Steps before which nothing is predicted."""
_FIRST_SOLVED = 16
"""Observations after which the coefficients are solved for the first time."""
_SOLVED_EVERY_S = 0.05
"""Seconds that observed steps took in all, after which they are solved for again: that takes half a
millisecond, so a hundredth. The chunks of the first long prompt tell how long the next will be."""
_DECODES, _DRAFTS = 16, 4
"""Of steps without prompts, which are many and alike, one in so many is observed: it costs 10 us,
and the shortest of them take 100 us. Of those with drafts, which differ, one in fewer. At first all
are."""
FACTOR = 20.0
"""Times what a step should take, after which its ranks count as hung: twice for the model's error,
ten times for a machine that others use as well."""
FIRST_FACTOR = 6.0
"""Times the timeout, for a step unlike any before: kernels that are first needed in it are compiled
meanwhile, some seconds each and a handful per model, so a minute of the usual ten seconds."""


class StepForecast:
    """Feeds an engine's one step-time model and asks it.

    Args:
        max_num_batched_tokens: of one step.
    """

    def __init__(self, max_num_batched_tokens: int) -> None:
        self._max_tokens = max_num_batched_tokens
        self._model = StepTimeModel()
        self.costs: StepCosts = self._model.costs
        """The coefficients of late; at first what is supposed of any engine."""
        self._unsolved_s = -math.inf
        """Seconds of the steps observed since the coefficients were solved for; before they were
        for the first time, of none."""
        self._last = StepShape()
        self._num_sampled = 0
        """Steps with prompts, and one in so many of those without."""
        self._num_drafting = 0
        """Steps with drafts; after the first ones each, what drafts cost is solved for."""
        self._most_prompts = self._most_decodes = 0
        """Prompt tokens, and decoding requests with their drafts, of any step so far."""

    @property
    def is_ready(self) -> bool:
        """Whether there were steps enough to predict others."""
        return self._model.num_observations >= _MIN_OBSERVATIONS

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Takes the duration of the last step; the same again, or one of nothing, is ignored."""
        is_empty = not (shape.prefill_tokens or shape.decode_rows)
        if shape.seq == self._last.seq or seconds <= 0.0 or is_empty:
            return
        self._last = shape
        self._most_prompts = max(self._most_prompts, shape.prefill_tokens)
        self._most_decodes = max(self._most_decodes, shape.decode_rows + shape.draft_tokens)
        self._num_drafting += shape.draft_rows > 0
        is_new = shape.draft_rows > 0 and self._num_drafting <= _MIN_OBSERVATIONS
        every = _DRAFTS if shape.draft_rows else _DECODES
        is_sampled = shape.prefill_tokens > 0 or shape.seq % every == 0
        self._num_sampled += is_sampled
        if self.is_ready and not (is_sampled or is_new):
            return
        self._model.observe(shape, seconds)
        # Here, not where somebody asks: same observations, same predictions.
        self._unsolved_s += seconds
        is_first = self._model.num_observations == _FIRST_SOLVED
        if is_first or is_new or self._unsolved_s >= _SOLVED_EVERY_S:
            self._unsolved_s = 0.0
            self.costs = self._model.costs

    def step_s(self, shape: StepShape) -> float:
        """Seconds for a step; of the first ones, by what is supposed of any engine."""
        return self.costs.step(shape)

    def is_unlike_any(self, shape: StepShape) -> bool:
        """Whether no step so far had so many prompt tokens, or decoding requests and drafts.

        True of the first hundreds of steps, in which kernels may still be compiled.
        """
        if self._num_sampled < _MIN_OBSERVATIONS:
            return True
        num_decodes = shape.decode_rows + shape.draft_tokens
        return shape.prefill_tokens > self._most_prompts or num_decodes > self._most_decodes

    def limit_s(self, shape: StepShape, timeout_s: float, num_passes: int = 1) -> float:
        """Seconds after which a step is overdue.

        Args:
            shape: what it is to compute.
            timeout_s: that every step has.
            num_passes: forward passes that it may take, each of such a shape.
        """
        limit = max(timeout_s, FACTOR * num_passes * self.step_s(shape))
        if self.is_unlike_any(shape):
            return max(limit, FIRST_FACTOR * timeout_s)
        return limit

    def prefill_s(self, num_tokens: int, num_cached: int) -> float | None:
        """Seconds to compute so many tokens after others; None before that is known."""
        if not self.is_ready:
            return None
        return self.costs.prefill(num_tokens, num_cached)

    def prompt_tokens(self, seconds: float, num_cached: int, *, scored: bool = False) -> float:
        """Tokens of a prompt that make a step longer by so many seconds; infinitely many before
        that is known.

        Args:
            seconds: beside what else is in the step.
            num_cached: positions of the prompt that are computed already.
            scored: whether log-probabilities of all its tokens are asked for.
        """
        if not self.is_ready:
            return math.inf
        costs = self.costs
        # seconds = linear * tokens + attended / 2 * tokens ** 2
        linear = costs.prefill_token + costs.attended * num_cached
        linear += costs.scored_token if scored else 0.0
        root = math.sqrt(linear**2 + 2.0 * costs.attended * seconds)
        return 2.0 * seconds / (linear + root) if root else math.inf

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
        costs = self.costs
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
        costs, last = self.costs, self._last
        headroom = max(self._max_tokens - last.decode_rows - last.draft_tokens, 1)
        return costs.prefill(num_tokens) + -(-num_tokens // headroom) * costs.decodes(last)
