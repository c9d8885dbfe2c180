"""How fast the workers of a fleet compute: one step-time model, and a speed for each worker."""

from __future__ import annotations

from math import exp, log
from statistics import fmean

from worker.wire.messages import LoadSnapshot
from worker.wire.step_time import StepCosts, StepTimeModel

_GAIN = 0.05
"""Weight of a new observation in a worker's speed."""
_SAME = 0.12
"""Workers whose logarithms lie within such a span are equals and get one factor, so that none is
favoured for a lucky estimate."""
_REFRESH = (8, 64)
"""Observations between two solutions: of few workers' first steps, and later."""
_FADES_S = 30.0
"""Seconds without a step after which a worker's difference from the others has faded to 1/e: one
that looked slow, perhaps because something disturbed it, gets a chance to show otherwise."""
_DECODES = 4
"""Of steps without prompts, which are many and alike, one in so many is observed."""


class FleetPace:
    """Learns from all workers' steps together, so that a new worker need not be learned anew.

    What is particular to a worker is a factor on all its times, which heterogeneous fleets need.
    """

    def __init__(self) -> None:
        self.costs: StepCosts
        """Of a worker of speed 1."""
        self._model = StepTimeModel()
        self.costs = self._model.costs
        self._due = _REFRESH[0]
        """Observations at which `costs` is computed again."""
        self._logs: dict[str, float] = {}
        """Per worker, logarithm of its times over those of speed 1."""
        self._factors: dict[str, float] = {}
        self._usual = 1.0
        self._steps: dict[str, int] = {}
        """Per worker, the last step that was observed."""
        self._seen_at: dict[str, float] = {}
        """Per worker, when that was."""

    def factor(self, worker_id: str) -> float:
        """The worker's times over those of `costs`; of a new one, what is usual in the fleet."""
        return self._factors.get(worker_id, self._usual)

    def observe(self, worker_id: str, load: LoadSnapshot, now: float) -> None:
        """Takes the last step that a report tells of, if it is a new one."""
        shape = load.step_shape
        last = self._steps.get(worker_id, 0)
        if not shape.seq or shape.seq == last or load.step_ms <= 0.0:
            return
        if not shape.prefill_tokens and last < shape.seq < last + _DECODES:
            return
        self._steps[worker_id] = shape.seq
        self._seen_at[worker_id] = now
        seconds = load.step_ms / 1000.0
        value = self._logs.get(worker_id, log(self._usual))
        self._model.observe(shape, seconds / exp(value))
        expected = self.costs.step(shape)
        self._logs[worker_id] = value + _GAIN * _bounded(log(seconds / expected) - value)
        if self._model.num_observations >= self._due:
            self.costs = self._model.costs
            self._group(now)
            first, later = _REFRESH
            self._due += min(max(first, self._due // 4), later)

    def forget(self, worker_id: str) -> None:
        """The worker is gone, or is another one under the old name."""
        self._logs.pop(worker_id, None)
        self._factors.pop(worker_id, None)
        self._seen_at.pop(worker_id, None)
        self._steps.pop(worker_id, None)

    def busy_s(self, worker_id: str, load: LoadSnapshot) -> float:
        """Seconds of the last step that its prompts took."""
        if not load.step_shape.prefill_tokens:
            return 0.0
        shape = load.step_shape
        decode = self.costs.decode(shape.decode_rows, shape.decode_context)
        return max(load.step_ms / 1000.0 - decode * self.factor(worker_id), 0.0)

    def _group(self, now: float) -> None:
        """Makes factors of logarithms: one for each group of about equal workers."""
        fresh = {name: exp((self._seen_at[name] - now) / _FADES_S) for name in self._logs}
        usual = fmean(self._logs.values(), [fresh[name] for name in self._logs])
        ranked = sorted(
            (usual + (value - usual) * fresh[name], name) for name, value in self._logs.items()
        )
        groups: list[list[tuple[float, str]]] = []
        for value, worker_id in ranked:
            if not groups or value - groups[-1][0][0] > _SAME:
                groups.append([])
            groups[-1].append((value, worker_id))
        for group in groups:
            factor = exp(fmean(value for value, _ in group))
            for _, worker_id in group:
                self._factors[worker_id] = factor
        self._usual = exp(usual)


def _bounded(value: float) -> float:
    return min(max(value, -1.0), 1.0)
