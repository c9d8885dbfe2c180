"""A simulated fleet in virtual time: a fluid queue, a delayed and possibly wrong meter, and workers
that need time to start or never become ready."""

from __future__ import annotations

from collections.abc import Iterable
from math import exp, inf
from random import Random

import numpy as np
from numpy.typing import NDArray

from cluster.autoscaling.config import AutoscalingConfig
from cluster.autoscaling.decision import Autoscaler
from cluster.autoscaling.load import FleetLoad

Curve = NDArray[np.float64]
METER_S = 10.0
"""Time constant in seconds of a gateway's arrival rates; that of expected waits is 3 s."""


class SimulatedFleet:
    """Workers that serve one second of work per second each, first come, first served.

    Args:
        config: configuration of the autoscaler.
        workers: initial target.
        missing: number of initial workers that never become ready.
        start_s: seconds from the request for a worker until it is ready.
        meter: fraction of the work, backlog and wait that gateways observe.
        stuck: 0-based indices of requested workers that never become ready.
        capacity: maximum number of workers that the cluster has room for.
        step_s: seconds of one step of the simulation.
        seed: seed of the choice of starts to cancel.
    """

    def __init__(
        self,
        config: AutoscalingConfig,
        *,
        workers: int,
        missing: int = 0,
        start_s: float,
        meter: float = 1.0,
        stuck: frozenset[int] = frozenset(),
        capacity: int = 10**6,
        step_s: float = 1.0,
        seed: int = 0,
    ) -> None:
        self.autoscaler = Autoscaler(config)
        self.now = 0.0
        self.target = workers
        self.ready = workers - missing
        self.targets = [workers]
        """Target of each step."""
        self.arrived = [0.0]
        self.served = [0.0]
        """Cumulative work per step."""
        self.readies = [self.ready]
        self._config = config
        self.start_s = start_s
        self._meter = meter
        self._stuck = stuck
        self._capacity = capacity
        self._step_s = step_s
        self._random = Random(seed)
        self._starting: list[float] = [inf] * missing
        """Time at which each worker is ready."""
        self._num_ordered = 0
        self._work: float | None = None
        self._delay_s = 0.0

    @property
    def backlog_s(self) -> float:
        return self.arrived[-1] - self.served[-1]

    def run(self, works: Iterable[float]) -> None:
        """Simulates one step per value of `works`, the load as the number of workers that it keeps
        busy."""
        for work in works:
            self._step(work)

    def hold(self, work: float, seconds: float) -> None:
        """Simulates a constant load."""
        self.run([work] * round(seconds / self._step_s))

    @property
    def num_changes(self) -> int:
        """Number of changes of the target."""
        return int(np.count_nonzero(np.diff(self.targets)))

    @property
    def worker_s(self) -> float:
        """Worker seconds requested, including startup."""
        return float(sum(self.targets[1:])) * self._step_s

    def waits(self) -> Curve:
        """Wait of the work that arrived in each step, in seconds; infinite if it has not been
        served yet."""
        times = np.arange(len(self.arrived)) * self._step_s
        waits: Curve = np.interp(self.arrived, self.served, times) - times
        waits[np.array(self.arrived) > self.served[-1] + 1e-6] = inf
        return np.maximum(waits, 0.0)

    def utilisation(self) -> float:
        """Fraction of the ready workers' time that was used."""
        return self.served[-1] / (sum(self.readies[1:]) * self._step_s)

    def _step(self, work: float) -> None:
        step_s = self._step_s
        self.now += step_s
        places = self._capacity - self.ready
        arrived = [at for at in self._starting if at <= self.now][:places]
        for at in arrived:
            self._starting.remove(at)
        self.ready += len(arrived)
        served_s = min(self.backlog_s + work * step_s, self.ready * step_s)
        self.arrived.append(self.arrived[-1] + work * step_s)
        self.served.append(self.served[-1] + served_s)
        if self._work is None:
            self._work = work
        self._work += (work - self._work) * (1.0 - exp(-step_s / METER_S))
        wait_s = self.backlog_s / self.ready if self.ready else 0.0
        self._delay_s += (wait_s - self._delay_s) * (1.0 - exp(-step_s / 3.0))
        load = FleetLoad(
            num_ready=self.ready,
            work=self._work * self._meter,
            backlog_s=self.backlog_s * self._meter,
            queue_delay_s=self._delay_s * self._meter,
            active=work > 0.0 or self.backlog_s > 1e-6,
            visited=work > 0.0,
        )
        self._change(self.autoscaler.decide(load, self.target, self.now))
        self.targets.append(self.target)
        self.readies.append(self.ready)

    def _change(self, target: int) -> None:
        for _ in range(self.target, target):
            stuck = self._num_ordered in self._stuck
            self._starting.append(inf if stuck else self.now + self.start_s)
            self._num_ordered += 1
        for _ in range(target, self.target):
            if self._starting:
                self._starting.pop(self._random.randrange(len(self._starting)))
            else:
                self.ready -= 1
        self.target = target


def noise(seed: int, steps: int, step_s: float = 1.0) -> Curve:
    """Factors around 1, which vary by 40 % from second to second and by 20 % over a minute."""
    random = np.random.default_rng(seed)
    fast = random.lognormal(-0.08 / step_s, 0.4 / step_s**0.5, steps)
    width = max(round(60.0 / step_s), 1)
    swell = np.convolve(random.normal(0.0, 1.0, steps + width - 1), np.ones(width), "valid")
    return np.asarray(fast * np.exp(0.2 * swell / width**0.5 - 0.02), dtype=np.float64)
