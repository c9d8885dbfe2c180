"""Step-time model: a linear model of an engine step's seconds, fitted to those measured.

    seconds = constant + a·prefill + b·attended + c·rows + d·context
              + e·drafting rows + f·drafts + g·first drafting rows + h·scored

where prefill is the number of prompt tokens, attended that of pairs of such a token and a position
that it attends to, rows that of decoding requests, context that of positions that these attend to,
drafts that of drafts verified, first drafting rows are those whose proposer meets their request for
the first time, and scored is the number of prompt tokens whose log-probabilities take logits
(`StepShape`). No coefficient is below zero.
"""

from __future__ import annotations

from operator import mul

import msgspec
import numpy as np

from worker.protocol.messages import StepShape

_SCALES = np.array((1.0, 1e3, 1e6, 1e1, 1e5, 1e1, 1e1, 1.0, 1e3))
"""Typical sizes of the terms, by which they are divided: the fit works on numbers near one."""
_PRIOR_S = np.array((2e-3, 1e-1, 2e-2, 5e-4, 1e-3, 2e-4, 5e-4, 1e-4, 1e-1))
"""Prior: seconds for a term of its typical size. A drafting row costs as the search for a first
guess, a draft as a row, a scored token as any of a prompt."""
_FORGETTING = 0.995
"""Weight that an observation keeps with each later one like it: about 200 count."""
_FORGOTTEN_EVERY = 2 * len(_SCALES)
"""Observations from one forgetting to the next: twice the number of terms, to show all that
varies."""
_EXCITED = 0.05
"""Least part of the steps' time, root mean square, that a combination of terms must make up for
observations to tell of it: like steps differ by some hundredths. Long prompts are planned alike
with anything from 0.01 to 0.2."""
_PRIOR_WEIGHT = 1e-3
"""Weight of the prior, where an observation has 1."""
_SHORTEST_S = 1e-4
"""Least seconds of an observation, by which its errors are divided."""


class StepCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Coefficients of the step-time model, in seconds per unit."""

    constant: float
    """Seconds per step."""
    prefill_token: float
    """Seconds per prompt token."""
    attended: float
    """Seconds per pair of a prompt token and a position that it attends to."""
    decode_row: float
    """Seconds per decoding request."""
    context_token: float
    """Seconds per position that a decoding request attends to."""
    draft_row: float = 0.0
    """Seconds per decoding request that drafts, to search for or compute the first guess."""
    draft_token: float = 0.0
    """Seconds per draft, to make and verify it."""
    draft_start: float = 0.0
    """Seconds per request that drafts for the first time, for its proposer to read its tokens."""
    scored_token: float = 0.0
    """Seconds per prompt token whose log-probabilities are computed, beside `prefill_token`."""

    def step(self, shape: StepShape) -> float:
        """Seconds of one step."""
        return (
            self.prefill_token * shape.prefill_tokens
            + self.attended * shape.prefill_attended
            + self.scored_token * shape.scored_tokens
            + self.decodes(shape)
        )

    def decodes(self, shape: StepShape) -> float:
        """Seconds of a step without its prompts."""
        return (
            self.decode(shape.decode_rows, shape.decode_context)
            + self.draft_row * shape.draft_rows
            + self.draft_token * shape.draft_tokens
            + self.draft_start * shape.draft_starts
        )

    def prefill(self, num_tokens: float, num_cached: float = 0.0) -> float:
        """Seconds to compute `num_tokens` of a prompt after `num_cached` that are there already,
        without the constant of the steps that take them."""
        attended = num_tokens * (num_cached + 0.5 * num_tokens)
        return self.prefill_token * num_tokens + self.attended * attended

    def decode(self, num_rows: float, context: float) -> float:
        """Seconds of a step in which `num_rows` requests decode over `context` positions in all."""
        return self.constant + self.decode_row * num_rows + self.context_token * context


class StepTimeModel:
    """Fit of StepCosts: least squares on relative errors, with forgetting, and no negative ones.

    The normal equations are updated with each observation; `costs` solves for the coefficients, by
    coordinate descent from the last ones.
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
        """The coefficients that fit the observations so far."""
        if self._stale:
            self._solve()
            self._stale = False
        names = StepCosts.__struct_fields__
        return StepCosts(**dict(zip(names, (self._solution / _SCALES).tolist(), strict=True)))

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Takes one step's duration."""
        # Errors are relative, so that a step that was held up counts next to nothing.
        terms = np.array(msgspec.structs.astuple(shape), float)
        terms[0] = 1.0  # instead of the step's number: the constant
        terms /= _SCALES * max(seconds, _SHORTEST_S)
        self._gram += np.outer(terms, terms)
        self._moment += terms * (seconds / max(seconds, _SHORTEST_S))
        self._recent[self.num_observations % _FORGOTTEN_EVERY] = terms
        self.num_observations += 1
        if self.num_observations % _FORGOTTEN_EVERY == 0:
            self._forget()
        self._stale = True

    def _forget(self) -> None:
        """Forgets a part of the information in the directions of recent observations only.

        Were all of it forgotten alike, an hour of short steps would forget what long prompts take.
        So the gram matrix is forgotten in the subspace that recent observations excite (SIFt-RLS,
        Lai and Bernstein 2024), and the moment with it, which moves no coefficient. The subspace
        has the combinations of terms that make up some of the steps' time, by the present
        coefficients; a term that costs nothing so far counts by its prior, or what is known of it
        would never be forgotten.
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
        self._gram = 0.5 * (gram + gram.T)  # rounding apart, it is; else that would grow

    def _solve(self, sweeps: int = 30) -> None:
        """Minimises the weighted squares plus the prior's, with no coefficient below zero."""
        solution, prior = self._solution, _PRIOR_S.tolist()
        # Relative to the prior, as the observations are to their durations.
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
