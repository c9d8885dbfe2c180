"""How long an engine step takes: a linear model of what is in it, fitted to what workers report.

    seconds = constant + a·prefill + b·attended + c·rows + d·context
              + e·drafting rows + f·drafts + g·first drafting rows

with the prompt tokens of the step, the pairs of positions that their attention looks at, the
requests that decode, the positions that those look at, and of speculation the rows that draft, the
drafts that are verified, and the rows whose proposer meets their request for the first time. Every
coefficient is at least zero.
"""

from __future__ import annotations

from operator import mul

import msgspec
import numpy as np

from worker.wire.messages import StepShape

_SCALES = np.array((1.0, 1e3, 1e6, 1e1, 1e5, 1e1, 1e1, 1.0))
"""Typical sizes of the terms: the fit works on numbers near one."""
_PRIOR_S = np.array((2e-3, 1e-1, 2e-2, 5e-4, 1e-3, 2e-4, 5e-4, 1e-4))
"""Seconds for a term of its typical size, until reports say better: drafting as the search for a
first guess, a draft as a row."""
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
    draft_row: float = 0.0
    """Per decoding request that drafts: its first guess is searched for or computed."""
    draft_token: float = 0.0
    """Per draft: it is made and verified."""
    draft_start: float = 0.0
    """Per request that drafts for the first time: its proposer reads what it has so far."""

    def step(self, shape: StepShape) -> float:
        """Seconds of one step."""
        return (
            self.prefill_token * shape.prefill_tokens
            + self.attended * shape.prefill_attended
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

    def __init__(self) -> None:
        self.num_observations = 0
        self._gram = np.zeros((len(_SCALES), len(_SCALES)))
        self._moment = np.zeros(len(_SCALES))
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
        # Relative errors: a step that was held up counts next to nothing.
        terms = np.array(msgspec.structs.astuple(shape), float)
        terms[0] = 1.0  # instead of the step's number: the constant
        terms /= _SCALES * max(seconds, _SHORTEST_S)
        self.num_observations += 1
        self._gram = _FORGETTING * self._gram + np.outer(terms, terms)
        self._moment = _FORGETTING * self._moment + terms * (seconds / max(seconds, _SHORTEST_S))
        self._stale = True

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
