"""How long an engine step takes: a linear model of what is in it, fitted to what workers report.

    seconds = constant + a·prefill + b·attended + c·rows + d·context

with the prompt tokens of the step, the pairs of positions that their attention looks at, the
requests that decode, and the positions that those look at. Every coefficient is at least zero.
"""

from __future__ import annotations

import msgspec

from worker.wire.messages import StepShape

_SCALES = (1.0, 1e3, 1e6, 1e1, 1e5)
"""Typical sizes of the five terms: the fit works on numbers near one."""
_PRIOR_S = (2e-3, 1e-1, 2e-2, 5e-4, 1e-3)
"""Seconds for a term of its typical size, until reports say better."""
_NUM_TERMS = len(_SCALES)
_FORGETTING = 0.995
"""Weight that an observation keeps with each later one: about 200 count."""
_PRIOR_WEIGHT = 1e-3
"""Weight of the prior, beside one per observation."""
_SHORTEST_S = 1e-4


class StepCosts(msgspec.Struct, frozen=True, kw_only=True):
    """The coefficients, in seconds per unit."""

    constant: float
    """Per step."""
    prefill_token: float
    attended: float
    """Per pair of a prompt token and a position that it attends to."""
    decode_row: float
    context_token: float
    """Per position that a decoding request attends to."""

    def step(self, shape: StepShape) -> float:
        """Seconds of one step."""
        return (
            self.constant
            + self.prefill_token * shape.prefill_tokens
            + self.attended * shape.prefill_attended
            + self.decode_row * shape.decode_rows
            + self.context_token * shape.decode_context
        )

    def prefill(self, num_tokens: float, num_cached: float = 0.0) -> float:
        """Seconds to compute `num_tokens` of a prompt after `num_cached` that are there already.

        Without the constant of the steps that it takes.
        """
        attended = num_tokens * (num_cached + 0.5 * num_tokens)
        return self.prefill_token * num_tokens + self.attended * attended

    def decode(self, num_rows: float, context: float) -> float:
        """Seconds of a step in which `num_rows` requests decode over `context` positions in all."""
        return self.constant + self.decode_row * num_rows + self.context_token * context


class StepTimeModel:
    """Least squares on relative errors with forgetting, under bounds.

    The normal equations are kept up to date with each observation; coefficients are solved for when
    they are asked for, by coordinate descent from the last ones.
    """

    def __init__(self, prior: tuple[float, ...] = _PRIOR_S) -> None:
        self.num_observations = 0
        self._gram = [[0.0] * _NUM_TERMS for _ in range(_NUM_TERMS)]
        self._moment = [0.0] * _NUM_TERMS
        self._prior = prior
        self._solution = list(prior)
        self._stale = False

    @property
    def costs(self) -> StepCosts:
        """The coefficients as the observations so far tell."""
        if self._stale:
            self._solve()
            self._stale = False
        constant, token, attended, row, context = (
            value / scale for value, scale in zip(self._solution, _SCALES, strict=True)
        )
        return StepCosts(
            constant=constant,
            prefill_token=token,
            attended=attended,
            decode_row=row,
            context_token=context,
        )

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Takes one step's duration."""
        terms = _terms(shape)
        # The square of a relative error: a step that was held up counts next to nothing.
        weight = 1.0 / max(seconds, _SHORTEST_S) ** 2
        self.num_observations += 1
        for row, moment_term in zip(self._gram, terms, strict=True):
            factor = weight * moment_term
            for place, term in enumerate(terms):
                row[place] = _FORGETTING * row[place] + factor * term
        self._moment = [
            _FORGETTING * moment + weight * term * seconds
            for moment, term in zip(self._moment, terms, strict=True)
        ]
        self._stale = True

    def _solve(self, sweeps: int = 30) -> None:
        """Minimises the weighted squares plus the prior's, with no coefficient below zero."""
        solution = self._solution
        for _ in range(sweeps):
            change = 0.0
            for place, row in enumerate(self._gram):
                # Relative to the prior, as the observations are to their durations.
                ridge = _PRIOR_WEIGHT / self._prior[place] ** 2
                others = sum(c * g for c, g in zip(solution, row, strict=True))
                others -= solution[place] * row[place]
                best = self._moment[place] - others + ridge * self._prior[place]
                best = max(0.0, best / (row[place] + ridge))
                change = max(change, abs(best - solution[place]) / self._prior[place])
                solution[place] = best
            if change < 1e-4:
                return


def _terms(shape: StepShape) -> tuple[float, ...]:
    return (
        1.0,
        shape.prefill_tokens / _SCALES[1],
        shape.prefill_attended / _SCALES[2],
        shape.decode_rows / _SCALES[3],
        shape.decode_context / _SCALES[4],
    )
