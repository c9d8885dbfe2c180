"""How fast the workers of a fleet compute: one step-time model, and a speed for each worker."""

from __future__ import annotations

from math import exp, log

import numpy as np

from router.fleet.constants import (
    PACE_BOUND,
    PACE_DECODES,
    PACE_GAIN,
    SAME_PACE,
    WINDOW_S,
)
from router.fleet.workers import Floats, grown
from worker.wire.messages import LoadSnapshot
from worker.wire.step_time import StepCosts, StepTimeModel

_NUM_COEFFICIENTS = 5
"""Coefficients of a step's time, those of drafts aside: as many observations, and later as many of
each worker, are there to solve for them anew."""


class FleetPace:
    """Learns from all workers' steps together, so that a new worker need not be learned anew.

    What is particular to a worker is a factor on all its times, which heterogeneous fleets need.
    Workers are distinguished by their rows in the WorkerTable.
    """

    def __init__(self) -> None:
        self.costs: StepCosts
        """Step times of a worker of speed 1."""
        self._model = StepTimeModel()
        self.costs = self._model.costs
        self._due = _NUM_COEFFICIENTS
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
        """Seconds of the fleet's clock at which that was."""

    def factor(self, row: int) -> float:
        """The worker's times over those of `costs`; of a new one, what is usual in the fleet."""
        factor = self._factors.item(row) if row < len(self._factors) else np.nan
        return self._usual if np.isnan(factor) else factor

    def factors(self, size: int) -> Floats:
        """The workers' times over those of `costs`, of the first `size` rows."""
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
        if not shape.prefill_tokens and last < shape.seq < last + PACE_DECODES:
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
        self._logs[row] = value + PACE_GAIN * min(max(error, -PACE_BOUND), PACE_BOUND)
        if self._model.num_observations >= self._due:
            self.costs = self._model.costs
            known = self._group(now)
            self._due += max(_NUM_COEFFICIENTS, min(self._due // 4, _NUM_COEFFICIENTS * known))

    def forget(self, row: int) -> None:
        """The worker is gone, or is another one under the old name."""
        if row < len(self._logs):
            self._logs[row] = self._factors[row] = np.nan
            self._steps[row] = 0

    def busy_s(self, row: int, load: LoadSnapshot) -> float:
        """Seconds of the last step that its prompts took."""
        if not load.step_shape.prefill_tokens:
            return 0.0
        decodes = self.costs.decodes(load.step_shape)
        return max(load.step_ms / 1000.0 - decodes * self.factor(row), 0.0)

    def _group(self, now: float) -> int:
        """Makes factors of logarithms: one for each group of about equal workers, so that none is
        favoured for a lucky estimate.

        Returns how many workers there are.
        """
        rows = np.flatnonzero(~np.isnan(self._logs))
        logs = self._logs[rows]
        # One that looked slow, perhaps because something disturbed it, and has had no step since
        # gets a chance to show otherwise: its difference from the others fades.
        fresh = np.exp((self._seen_at[rows] - now) / WINDOW_S)
        usual = float(np.average(logs, weights=fresh))
        values = usual + (logs - usual) * fresh
        order = values.argsort(kind="stable")
        values, rows = values[order], rows[order]
        start = 0
        while start < len(rows):
            end = int(values.searchsorted(values[start] + SAME_PACE, side="right"))
            self._factors[rows[start:end]] = exp(float(values[start:end].mean()))
            start = end
        self._usual = exp(usual)
        return len(rows)

    def _grow(self, size: int) -> None:
        if size > len(self._logs):
            size = max(size, 2 * len(self._logs))
            self._logs = grown(self._logs, size, np.nan)
            self._factors = grown(self._factors, size, np.nan)
            self._steps = grown(self._steps, size)
            self._seen_at = grown(self._seen_at, size)
