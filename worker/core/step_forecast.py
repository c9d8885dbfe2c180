"""Step-time forecast for deadlines, host-memory copies, deferral, drafts and the watchdog."""

from __future__ import annotations

import math

from worker.protocol.messages import StepShape
from worker.protocol.step_time import StepCosts, StepTimeModel

_MIN_OBSERVATIONS = 20
"""Number of observed steps before predictions start."""
_FIRST_SOLVED = 16
"""Number of observations before the coefficients are computed for the first time."""
_SOLVED_EVERY_S = 0.05
"""Total duration of observed steps, in seconds, after which the coefficients are computed again.
That takes half a millisecond, 1 % of this duration. The first long prompt thus suffices to predict
the next one."""
_DECODES, _DRAFTS = 16, 4
"""Sampling of steps without prefill, which are many and similar: 1 in 16 is observed, or 1 in 4 of
those with drafts, which vary more. An observation takes 10 us, the shortest steps take 100 us.
Until predictions start, all steps are observed."""
FACTOR = 20.0
"""Multiple of the predicted step time after which a step counts as hung: 2 for the error of the
prediction, times 10 for a shared machine."""
FIRST_FACTOR = 6.0
"""Multiple of the timeout that is allowed for a step larger than any before, since kernels may be
compiled: a few kernels per model, some seconds each. With a timeout of ten seconds, this is a
minute."""


class StepForecast:
    """Fits the step-time model to an engine's steps, and predicts step times.

    Args:
        max_num_batched_tokens: token budget of one step.
    """

    def __init__(self, max_num_batched_tokens: int) -> None:
        self._max_tokens = max_num_batched_tokens
        self._model = StepTimeModel()
        self.is_ready = False
        """Whether enough steps have been observed to make predictions."""
        self.costs: StepCosts = self._model.costs
        """The last computed coefficients; initially a prior that suits any engine."""
        self._unsolved_s = -math.inf
        """Total duration of the steps observed since the coefficients were last computed; minus
        infinity until they are first computed, after `_FIRST_SOLVED` observations or with the first
        step with drafts."""
        self._last = StepShape()
        self._num_sampled = 0
        """Number of observed steps: all steps with prefill and a sample of all other steps (see
        `observe`)."""
        self._num_drafting = 0
        """Number of steps with drafts. The first few are all observed, and the coefficients are
        computed after each of them."""
        self._max_prompts = self._max_decodes = 0
        """Maximum number of prompt tokens, and maximum number of decoding requests plus drafts, in
        any step so far."""

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Records the duration of the last step; repeated and empty steps are ignored."""
        is_empty = not (shape.prefill_tokens or shape.decode_rows)
        if shape.seq == self._last.seq or seconds <= 0.0 or is_empty:
            return
        self._last = shape
        self._max_prompts = max(self._max_prompts, shape.prefill_tokens)
        self._max_decodes = max(self._max_decodes, shape.decode_rows + shape.draft_tokens)
        self._num_drafting += shape.draft_rows > 0
        is_new = shape.draft_rows > 0 and self._num_drafting <= _MIN_OBSERVATIONS
        every = _DRAFTS if shape.draft_rows else _DECODES
        is_sampled = shape.prefill_tokens > 0 or shape.seq % every == 0
        self._num_sampled += is_sampled
        if self.is_ready and not (is_sampled or is_new):
            return
        self._model.observe(shape, seconds)
        self.is_ready = self._model.num_observations >= _MIN_OBSERVATIONS
        # Here rather than in a prediction, so that the same observations give the same predictions.
        self._unsolved_s += seconds
        is_first = self._model.num_observations == _FIRST_SOLVED
        if is_first or is_new or self._unsolved_s >= _SOLVED_EVERY_S:
            self._unsolved_s = 0.0
            self.costs = self._model.costs

    def limit_s(self, shape: StepShape, timeout_s: float, num_passes: int = 1) -> float:
        """Time in seconds after which a step is considered hung.

        The limit is longer for the first few hundred steps, and for a step with more prompt tokens,
        or more decoding requests and drafts, than any before: kernels may still be compiled.

        Args:
            shape: shape of one pass of the step.
            timeout_s: minimum limit, in seconds.
            num_passes: maximum number of forward passes of the step.
        """
        limit = max(timeout_s, FACTOR * num_passes * self.costs.step(shape))
        is_new = (
            self._num_sampled < _MIN_OBSERVATIONS
            or shape.prefill_tokens > self._max_prompts
            or shape.decode_rows + shape.draft_tokens > self._max_decodes
        )
        return max(limit, FIRST_FACTOR * timeout_s) if is_new else limit

    def prefill_s(self, num_tokens: int, num_cached: int) -> float | None:
        """Predicted time to prefill `num_tokens` tokens after `num_cached` cached ones, in seconds;
        None before predictions start."""
        if not self.is_ready:
            return None
        return self.costs.prefill(num_tokens, num_cached)

    def prompt_tokens(self, seconds: float, num_cached: int, *, scored: bool = False) -> float:
        """Number of prompt tokens that make a step longer by a given time; infinite if unknown.

        Args:
            seconds: time added to the step.
            num_cached: number of positions of the prompt that are already computed.
            scored: whether log-probabilities of all prompt tokens are requested.
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
        """Fraction (0 to 1) of a step's time that decodes take alongside the prefill of the step.

        Returns 0 before predictions start, and if decodes take less than the constant time per
        step, which a separate step for them would add.

        Args:
            num_rows: number of decoding requests.
            context: total number of positions that they attend to.
            num_prompt_tokens: number of prompt tokens in the step.
        """
        if not self.is_ready:
            return 0.0
        costs = self.costs
        decodes = costs.decode_row * num_rows + costs.context_token * context
        if decodes <= costs.constant:
            return 0.0
        return decodes / (costs.constant + costs.prefill(num_prompt_tokens) + decodes)

    def first_token_s(self, num_tokens: int) -> float:
        """Predicted time from admission to the first token of a request with `num_tokens` to
        compute, in seconds; 0 before predictions start.

        The prefill is assumed to take several steps, each with the same decodes as the last step.
        """
        if not self.is_ready:
            return 0.0
        costs, last = self.costs, self._last
        headroom = max(self._max_tokens - last.decode_rows - last.draft_tokens, 1)
        return costs.prefill(num_tokens) + -(-num_tokens // headroom) * costs.decodes(last)
