"""Forecast of step times from those measured: for deadlines, copies from host memory, deferral of
decodes, drafts and the watchdog."""

from __future__ import annotations

import math

from worker.protocol.messages import StepShape
from worker.protocol.step_time import StepCosts, StepTimeModel

_MIN_OBSERVATIONS = 20
"""Observed steps before which nothing is predicted."""
_FIRST_SOLVED = 16
"""Observations after which the coefficients are solved for the first time."""
_SOLVED_EVERY_S = 0.05
"""Seconds that observed steps took in all, after which the coefficients are solved for again. That
takes half a millisecond, a hundredth of it. So the chunks of the first long prompt tell how long
those of the next will take."""
_DECODES, _DRAFTS = 16, 4
"""Sampling of steps without prompts, which are many and alike: one in 16 is observed, with drafts,
which make them differ, one in 4. To observe one costs 10 us, and the shortest take 100 us. Until
predictions begin all are observed."""
FACTOR = 20.0
"""Multiple of its predicted time after which a step counts as hung: twice for the model's error,
ten times for a machine that others use as well."""
FIRST_FACTOR = 6.0
"""Multiple of the timeout for a step larger than any before: kernels that it needs first are
compiled meanwhile, some seconds each and a handful per model, so a minute where the timeout is ten
seconds."""


class StepForecast:
    """Fits one engine's step-time model to its steps, and predicts from it.

    Args:
        max_num_batched_tokens: token budget of one step.
    """

    def __init__(self, max_num_batched_tokens: int) -> None:
        self._max_tokens = max_num_batched_tokens
        self._model = StepTimeModel()
        self.is_ready = False
        """Whether enough steps were observed to predict others."""
        self.costs: StepCosts = self._model.costs
        """Coefficients as last solved for; at first a prior for any engine."""
        self._unsolved_s = -math.inf
        """Seconds of the steps observed since the last solution; minus infinity before the first,
        which `_FIRST_SOLVED` triggers."""
        self._last = StepShape()
        self._num_sampled = 0
        """Steps that were sampled: all with prompts, and one in so many of those without."""
        self._num_drafting = 0
        """Steps with drafts; each of the first ones is observed, and solved for at once."""
        self._most_prompts = self._most_decodes = 0
        """Most prompt tokens, and most decoding requests plus drafts, of any step so far."""

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Takes the duration of the last step; a repetition or an empty step is ignored."""
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
        self.is_ready = self._model.num_observations >= _MIN_OBSERVATIONS
        # Here, not in a prediction: the same observations are to give the same predictions.
        self._unsolved_s += seconds
        is_first = self._model.num_observations == _FIRST_SOLVED
        if is_first or is_new or self._unsolved_s >= _SOLVED_EVERY_S:
            self._unsolved_s = 0.0
            self.costs = self._model.costs

    def limit_s(self, shape: StepShape, timeout_s: float, num_passes: int = 1) -> float:
        """Seconds after which a step is overdue.

        Longer for the first hundreds of steps, and for one with more prompt tokens, or decoding
        requests and drafts, than any before: kernels may still be compiled.

        Args:
            shape: what the step computes in one pass.
            timeout_s: the least limit of any step.
            num_passes: most forward passes that the step takes.
        """
        limit = max(timeout_s, FACTOR * num_passes * self.costs.step(shape))
        is_new = (
            self._num_sampled < _MIN_OBSERVATIONS
            or shape.prefill_tokens > self._most_prompts
            or shape.decode_rows + shape.draft_tokens > self._most_decodes
        )
        return max(limit, FIRST_FACTOR * timeout_s) if is_new else limit

    def prefill_s(self, num_tokens: int, num_cached: int) -> float | None:
        """Predicted seconds to compute `num_tokens` of a prompt after `num_cached`; None before
        predictions begin."""
        if not self.is_ready:
            return None
        return self.costs.prefill(num_tokens, num_cached)

    def prompt_tokens(self, seconds: float, num_cached: int, *, scored: bool = False) -> float:
        """Tokens of a prompt that make a step longer by so many seconds; infinity before
        predictions begin.

        Args:
            seconds: what they add to the step.
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
        """Part of a step's time, 0 to 1, that decodes take beside the prompts of the step.

        0 before predictions begin, and where decodes take less than the constant part of a step,
        which they would cost once more in a step of their own.

        Args:
            num_rows: requests that decode.
            context: positions that they attend to in all.
            num_prompt_tokens: prompt tokens of the step.
        """
        if not self.is_ready:
            return 0.0
        costs = self.costs
        decodes = costs.decode_row * num_rows + costs.context_token * context
        if decodes <= costs.constant:
            return 0.0
        return decodes / (costs.constant + costs.prefill(num_prompt_tokens) + decodes)

    def first_token_s(self, num_tokens: int) -> float:
        """Predicted seconds from admission to the first token of a request with `num_tokens` to
        compute; 0 before predictions begin.

        They fill a number of steps, each of which decodes what the last step did as well.
        """
        if not self.is_ready:
            return 0.0
        costs, last = self.costs, self._last
        headroom = max(self._max_tokens - last.decode_rows - last.draft_tokens, 1)
        return costs.prefill(num_tokens) + -(-num_tokens // headroom) * costs.decodes(last)
