"""How fast the workers of a fleet compute: one step-time model, and a speed for each worker."""

from __future__ import annotations

from math import exp, log

import numpy as np

from router.fleet.workers import Floats
from worker.wire.messages import LoadSnapshot
from worker.wire.step_time import StepCosts, StepTimeModel

_GAIN = 0.05
"""Weight of a new observation in a worker's speed."""
_SAME = 0.12
"""Workers whose logarithms lie within such a span are equals and get one factor, so that none is
favoured for a lucky estimate."""
_REFRESH = (8, 64)
"""Observations between two solutions: of few workers' first steps, and later. A fleet of more
workers than that waits for one of each."""
_FADES_S = 30.0
"""Seconds without a step after which a worker's difference from the others has faded to 1/e: one
that looked slow, perhaps because something disturbed it, gets a chance to show otherwise."""
_DECODES = 4
"""Of steps without prompts, which are many and alike, one in so many is observed."""


class FleetPace:
    """Learns from all workers' steps together, so that a new worker need not be learned anew.

    What is particular to a worker is a factor on all its times, which heterogeneous fleets need.
    Workers are distinguished by their rows in the WorkerTable.
    """

    def __init__(self) -> None:
        self.costs: StepCosts
        """Of a worker of speed 1."""
        self._model = StepTimeModel()
        self.costs = self._model.costs
        self._due = _REFRESH[0]
        """Observations at which `costs` is computed again."""
        self._usual = 1.0
        # By row.
        self._logs = np.zeros(0)
        """Logarithm of its times over those of speed 1; NaN before it was observed."""
        self._factors = np.zeros(0)
        """NaN before there is one."""
        self._steps = np.zeros(0, np.int64)
        """The last step that was observed."""
        self._seen_at = np.zeros(0)
        """When that was."""

    def factor(self, row: int) -> float:
        """The worker's times over those of `costs`; of a new one, what is usual in the fleet."""
        factor = self._factors.item(row) if row < len(self._factors) else np.nan
        return self._usual if np.isnan(factor) else factor

    def factors(self, size: int) -> Floats:
        """The same of the first `size` rows."""
        self._grow(size)
        factors = self._factors[:size]
        return np.where(np.isnan(factors), self._usual, factors)

    def observe(self, row: int, load: LoadSnapshot, now: float) -> None:
        """Takes the last step that a report tells of, if it is a new one."""
        self._grow(row + 1)
        shape = load.step_shape
        last = self._steps.item(row)
        if not shape.seq or shape.seq == last or load.step_ms <= 0.0:
            return
        if not shape.prefill_tokens and last < shape.seq < last + _DECODES:
            return
        self._steps[row] = shape.seq
        self._seen_at[row] = now
        seconds = load.step_ms / 1000.0
        value = self._logs.item(row)
        if value != value:  # NaN
            value = log(self._usual)
        self._model.observe(shape, seconds / exp(value))
        expected = self.costs.step(shape)
        # With no coefficient below zero, all those of a step may be zero: it says nothing then.
        error = log(seconds / expected) - value if expected > 0.0 else 0.0
        self._logs[row] = value + _GAIN * _bounded(error)
        if self._model.num_observations >= self._due:
            self.costs = self._model.costs
            known = self._group(now)
            first, later = _REFRESH
            self._due += min(max(first, self._due // 4), max(later, known))

    def forget(self, row: int) -> None:
        """The worker is gone, or is another one under the old name."""
        if row < len(self._logs):
            self._logs[row] = self._factors[row] = np.nan
            self._steps[row] = 0

    def busy_s(self, row: int, load: LoadSnapshot) -> float:
        """Seconds of the last step that its prompts took."""
        if not load.step_shape.prefill_tokens:
            return 0.0
        shape = load.step_shape
        decode = self.costs.decode(shape.decode_rows, shape.decode_context)
        return max(load.step_ms / 1000.0 - decode * self.factor(row), 0.0)

    def _group(self, now: float) -> int:
        """Makes factors of logarithms: one for each group of about equal workers.

        Returns how many workers there are.
        """
        rows = np.flatnonzero(~np.isnan(self._logs))
        logs = self._logs[rows]
        fresh = np.exp((self._seen_at[rows] - now) / _FADES_S)
        usual = float(np.average(logs, weights=fresh))
        values = usual + (logs - usual) * fresh
        order = values.argsort(kind="stable")
        values, rows = values[order], rows[order]
        start = 0
        while start < len(rows):
            end = int(values.searchsorted(values[start] + _SAME, side="right"))
            self._factors[rows[start:end]] = exp(float(values[start:end].mean()))
            start = end
        self._usual = exp(usual)
        return len(rows)

    def _grow(self, size: int) -> None:
        more = size - len(self._logs)
        if more <= 0:
            return
        more = max(more, len(self._logs))
        nothing = np.full(more, np.nan)
        self._logs = np.concatenate([self._logs, nothing])
        self._factors = np.concatenate([self._factors, nothing])
        self._steps = np.concatenate([self._steps, np.zeros(more, np.int64)])
        self._seen_at = np.concatenate([self._seen_at, np.zeros(more)])


def _bounded(value: float) -> float:
    return min(max(value, -1.0), 1.0)
