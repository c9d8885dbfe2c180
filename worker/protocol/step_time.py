"""Step-time model: a linear model of an engine step's duration, fitted to measurements.

    seconds = constant + a·prefill + b·attended + c·rows + d·context
              + e·drafting rows + f·drafts + g·first drafting rows + h·scored

The terms count (see `StepShape`):

    prefill              prompt tokens
    attended             pairs of a prompt token and a position that it attends to
    rows                 decoding requests
    context              positions that decoding requests attend to, in total
    drafting rows        decoding requests with drafting enabled
    drafts               verified draft tokens
    first drafting rows  requests whose proposer runs for the first time
    scored               prompt tokens whose log-probabilities are computed

Coefficients are non-negative.
"""

from __future__ import annotations

from operator import mul

import msgspec
import numpy as np

from worker.protocol.messages import StepShape

_SCALES = np.array((1.0, 1e3, 1e6, 1e1, 1e5, 1e1, 1e1, 1.0, 1e3))
"""Typical sizes of the terms, by which they are normalized for the fit."""
_PRIOR_S = np.array((2e-3, 1e-1, 2e-2, 5e-4, 1e-3, 2e-4, 5e-4, 1e-4, 1e-1))
"""Prior of the coefficients, in seconds per term of typical size. A drafting row costs as much as
the search for a first draft token, a draft token as much as a row, and a scored token as much as a
prompt token."""
_FORGETTING = 0.995
"""Factor by which the weight of an observation decays with each later similar one, so that about
200 observations count."""
_FORGOTTEN_EVERY = 2 * len(_SCALES)
"""Number of observations between forgetting steps: twice the number of terms, so that they
cover all combinations of terms that vary."""
_EXCITED = 0.05
"""Threshold above which recent steps count as information about a combination of terms: the
combination's contribution to their time (root mean square), as a fraction of that time. Similar
steps differ by a few percent. Values of 0.01 to 0.2 lead to the same plans for long prompts."""
_PRIOR_WEIGHT = 1e-3
"""Weight of the prior relative to one observation."""
_SHORTEST_S = 1e-4
"""Minimum duration assumed for an observation, in seconds, since prediction errors are divided by
the duration."""


class StepCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Coefficients of the step-time model in seconds per unit."""

    constant: float
    """Seconds per step, regardless of its contents."""
    prefill_token: float
    """Seconds per prompt token."""
    attended: float
    """Seconds per pair of a prompt token and a position that it attends to."""
    decode_row: float
    """Seconds per decoding request."""
    context_token: float
    """Seconds per position that a decoding request attends to."""
    draft_row: float = 0.0
    """Seconds per drafting request, to search for or compute the first draft token."""
    draft_token: float = 0.0
    """Seconds per draft token, to generate and verify it."""
    draft_start: float = 0.0
    """Seconds per request that drafts for the first time, for its proposer to process its
    tokens.
    """
    scored_token: float = 0.0
    """Additional seconds per prompt token whose log-probabilities are computed."""

    def step(self, shape: StepShape) -> float:
        """Predicted duration of a step, in seconds."""
        return (
            self.prefill_token * shape.prefill_tokens
            + self.attended * shape.prefill_attended
            + self.scored_token * shape.scored_tokens
            + self.constant
            + self.decode_row * shape.decode_rows
            + self.context_token * shape.decode_context
            + self.draft_row * shape.draft_rows
            + self.draft_token * shape.draft_tokens
            + self.draft_start * shape.draft_starts
        )

    def decodes(self, shape: StepShape) -> float:
        """Predicted duration of a step without its prefill, in seconds."""
        return (
            self.decode(shape.decode_rows, shape.decode_context)
            + self.draft_row * shape.draft_rows
            + self.draft_token * shape.draft_tokens
            + self.draft_start * shape.draft_starts
        )

    def prefill(self, num_tokens: float, num_cached: float = 0.0) -> float:
        """Predicted time to prefill `num_tokens` tokens after `num_cached` cached ones, in seconds,
        without the constant."""
        attended = num_tokens * (num_cached + 0.5 * num_tokens)
        return self.prefill_token * num_tokens + self.attended * attended

    def decode(self, num_rows: float, context: float) -> float:
        """Predicted duration of a step with `num_rows` decodes that attend to `context` positions
        in total, in seconds."""
        return self.constant + self.decode_row * num_rows + self.context_token * context


class StepTimeModel:
    """Fits StepCosts by non-negative least squares on relative errors, with forgetting.

    Each observation updates the normal equations; `costs` solves for the coefficients by
    coordinate descent, starting from the previous solution.
    """

    def __init__(self) -> None:
        self.num_observations = 0
        self._gram = np.zeros((len(_SCALES), len(_SCALES)))
        self._moment = np.zeros(len(_SCALES))
        self._recent = np.zeros((_FORGOTTEN_EVERY, len(_SCALES)))
        """Terms of the last observations, [_FORGOTTEN_EVERY, terms], for `_forget`."""
        self._solution: list[float] = _PRIOR_S.tolist()
        self._stale = False

    @property
    def costs(self) -> StepCosts:
        """Coefficients fitted to the observations so far."""
        if self._stale:
            self._solve()
            self._stale = False
        names = StepCosts.__struct_fields__
        return StepCosts(**dict(zip(names, (self._solution / _SCALES).tolist(), strict=True)))

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Adds an observation: the shape and duration of one step."""
        # Errors are relative, so that a delayed step has little weight.
        terms = np.array(msgspec.structs.astuple(shape), float)
        terms[0] = 1.0  # constant term in place of the step's number
        terms /= _SCALES * max(seconds, _SHORTEST_S)
        self._gram += np.outer(terms, terms)
        self._moment += terms * (seconds / max(seconds, _SHORTEST_S))
        self._recent[self.num_observations % _FORGOTTEN_EVERY] = terms
        self.num_observations += 1
        if self.num_observations % _FORGOTTEN_EVERY == 0:
            self._forget()
        self._stale = True

    def _forget(self) -> None:
        """Forgets part of the information, in the directions of recent observations only.

        With uniform forgetting, an hour of short steps would erase the cost of long prompts. The
        Gram matrix is therefore only discounted in the subspace excited by recent observations
        (SIFt-RLS, Lai and Bernstein 2024). The moment is discounted along with it, which leaves the
        coefficients unchanged. The subspace consists of the combinations of terms that contribute
        to the steps' time under the current coefficients; a term whose coefficient is zero counts
        with its prior, since it would never be forgotten otherwise.
        """
        scale = np.where(np.array(self._solution) > 0.0, self._solution, _PRIOR_S)
        _, values, directions = np.linalg.svd(self._recent * scale, full_matrices=False)
        excited = values > _EXCITED * np.sqrt(_FORGOTTEN_EVERY)
        basis = (directions[excited] * scale).T
        along = self._gram @ basis
        weights = np.linalg.solve(basis.T @ along, along.T)
        forgotten = 1.0 - _FORGETTING**_FORGOTTEN_EVERY
        self._moment -= forgotten * (self._moment @ basis) @ weights
        gram = self._gram - forgotten * along @ weights
        self._gram = 0.5 * (gram + gram.T)  # symmetrize, or rounding errors would grow

    def _solve(self, sweeps: int = 30) -> None:
        """Minimizes the weighted squared errors of the observations and of the prior over
        non-negative coefficients."""
        solution, prior = self._solution, _PRIOR_S.tolist()
        # Relative to the prior, as observations are relative to their durations.
        ridge = _PRIOR_WEIGHT / _PRIOR_S**2
        gram = (self._gram + np.diag(ridge)).tolist()
        target = (self._moment + ridge * _PRIOR_S).tolist()
        for _ in range(sweeps):
            change = 0.0
            for index, row in enumerate(gram):
                rest = target[index] - sum(map(mul, row, solution))
                best = max(0.0, solution[index] + rest / row[index])
                change = max(change, abs(best - solution[index]) / prior[index])
                solution[index] = best
            if change < 1e-4:
                return
