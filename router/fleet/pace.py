"""FleetPace: a step-time model for the fleet, and a speed factor for each worker."""

from __future__ import annotations

from math import exp, log

import numpy as np

from router.fleet.constants import (
    PACE_BOUND,
    PACE_GAIN,
    PACE_SPACING_S,
    SAME_PACE,
    WINDOW_S,
)
from router.fleet.workers import Floats, grown
from worker.protocol.messages import LoadSnapshot, PrefillSteps
from worker.protocol.step_time import StepCosts, StepTimeModel

_NUM_COEFFICIENTS = 5
"""Number of coefficients of the step-time model, excluding those of drafts. The model is first
fitted after this many observations, and again whenever their number has grown by a quarter, though
by no less than this number, and by no more than this number per worker."""


class FleetPace:
    """Fits a step-time model to the reports of all workers, and a factor to those of each worker.

    The model is shared, so that the times of a new worker are known. The factor scales all times of
    a worker, for fleets with different GPUs. Workers are identified by their rows in the
    WorkerTable.
    """

    def __init__(self) -> None:
        self.costs: StepCosts
        """Step-time coefficients of a worker with factor 1."""
        self._model = StepTimeModel()
        self.costs = self._model.costs
        self._due = _NUM_COEFFICIENTS
        """Number of observations at which `costs` is computed next."""
        self._spacing_s = 0.0
        """Minimum seconds between observations of a worker."""
        self._usual = 1.0
        """Factor of a worker without observations."""
        # Arrays by row.
        self._logs = np.zeros(0)
        """Logarithm of each worker's factor, a moving average; NaN before its first observation."""
        self._factors = np.zeros(0)
        """Factor used for each worker; NaN before there is one."""
        self._seen_at = np.zeros(0)
        """Time of each worker's last observation, on the fleet's clock."""

    def factor(self, row: int) -> float:
        """The worker's step times relative to `costs`; the fleet's mean for a new worker."""
        factor = self._factors.item(row) if row < len(self._factors) else np.nan
        return self._usual if factor != factor else factor  # NaN; np.isnan takes 0.5 us

    def factors(self, size: int) -> Floats:
        """`factor` of the first `size` rows."""
        self._grow(size)
        factors = self._factors[:size]
        return np.where(np.isnan(factors), self._usual, factors)

    def is_due(self, row: int, now: float) -> bool:
        """Whether enough time has passed since the worker's last observation for another one."""
        self._grow(row + 1)
        return now - self._seen_at.item(row) >= self._spacing_s

    def observe(self, row: int, load: LoadSnapshot, now: float) -> None:
        """Updates the model with the last step in a report."""
        self._grow(row + 1)
        shape, seconds = load.step_shape, load.step_ms / 1000.0
        self._seen_at[row] = now
        value = self._logs.item(row)
        if value != value:  # NaN
            value = log(self._usual)
        self._model.observe(shape, seconds / exp(value))
        expected = self.costs.step(shape)
        # All coefficients of a step may be zero, as none is negative: it carries no information
        # then.
        error = log(seconds / expected) - value if expected > 0.0 else 0.0
        self._logs[row] = value + PACE_GAIN * min(max(error, -PACE_BOUND), PACE_BOUND)
        if self._model.num_observations >= self._due:
            self.costs = self._model.costs
            known = self._group(now)
            self._due += max(_NUM_COEFFICIENTS, min(self._due // 4, _NUM_COEFFICIENTS * known))

    def forget(self, row: int) -> None:
        """Removes a worker that has left, or whose rank group has failed."""
        if row < len(self._logs):
            self._logs[row] = self._factors[row] = np.nan

    def busy_s(self, row: int, before: PrefillSteps, after: PrefillSteps) -> float:
        """Seconds spent on prefills in the steps from the report `before` to the report `after`."""
        num_steps = after.num_steps - before.num_steps
        if num_steps <= 0:
            return 0.0
        costs = self.costs
        decodes_s = costs.decodes(after.decodes) - costs.decodes(before.decodes)
        decodes_s += num_steps * costs.constant
        return max((after.step_ms - before.step_ms) / 1e3 - decodes_s * self.factor(row), 0.0)

    def _group(self, now: float) -> int:
        """Computes the factors in use: one per group of workers of about equal speed, so that no
        worker is preferred because of noise in its estimate.

        Returns the number of workers with observations.
        """
        rows = np.flatnonzero(~np.isnan(self._logs))
        self._spacing_s = len(rows) * PACE_SPACING_S
        logs = self._logs[rows]
        # A worker that seemed slow gets few requests and thus few observations: its difference from
        # the others decays, so that it is tried again.
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
            self._seen_at = grown(self._seen_at, size)
