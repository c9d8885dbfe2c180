"""Simulated autoscaler: production code, run once per simulated second."""

from __future__ import annotations

from collections.abc import Callable

from cluster.autoscaling.config import AutoscalingConfig
from cluster.autoscaling.decision import Autoscaler
from cluster.autoscaling.load import combined
from deploy.benchmarks.routing.workload import Incident
from router.fleet import Fleet
from router.metrics.stats import ModelStats
from router.serving.load import LoadMeter
from tests.campaigns.scale.options import ScaleOptions
from tests.campaigns.scale.stopwatch import Stopwatch
from worker.protocol.messages import StepReport

_EVERY_S = 1.0
_STARTS_S = 5.0
"""Seconds from a scale-up decision until the worker is ready."""


class Scaler:
    """Reads the gateway's load, decides on the number of workers, and adds or removes workers if
    enabled.

    Args:
        options: initial and maximum number of workers.
        fleet: the gateway's fleet.
        clock: clock of the simulation.
    """

    def __init__(self, options: ScaleOptions, fleet: Fleet, clock: Callable[[], float]) -> None:
        self.watch = Stopwatch()
        """Durations from the gateway's counters to the number of workers."""
        self.stats = ModelStats()
        self.suffer: Callable[[Incident], None] = lambda incident: None
        """Callback that applies an incident to the simulation."""
        self.max_target = 0.0
        """Maximum number of workers that the load required."""
        self.target = options.workers
        self.targets = [options.workers]
        self._acts = options.max_workers > 0
        self._fleet = fleet
        self._clock = clock
        self._joined: list[int] = []
        self._next = options.workers
        self._meter = LoadMeter(self.stats, fleet, clock)
        self._autoscaler = Autoscaler(
            AutoscalingConfig(
                min_workers=options.workers,
                max_workers=options.max_workers or options.workers,
                downscale_delay_s=options.downscale_delay_s,
            )
        )
        self._due = _EVERY_S

    def arrived(self, num_tokens: int, hit_tokens: int) -> None:
        """Records that a request was placed."""
        self.stats.prompt_tokens += num_tokens
        self.stats.saved_tokens += hit_tokens
        self.stats.started += 1
        self.stats.prompt_length.observe(num_tokens)

    def reported(self, report: StepReport, output_len: int) -> None:
        """Handles the report of a worker's step."""
        for deltas in report.deltas.values():
            for delta in deltas:
                self.stats.generation_tokens += len(delta.token_ids)
                if delta.finish_reason is not None:
                    self.stats.completion_tokens.observe(output_len)
        self.look()

    def look(self) -> None:
        """Runs the autoscaler if a second has passed."""
        now = self._clock()
        if now < self._due:
            return
        self._due = now + _EVERY_S
        with self.watch:
            load = combined([self._meter.read()])
            target = self._autoscaler.decide(load, self.target, now)
        self.max_target = max(self.max_target, self._autoscaler.needed_workers(load))
        if self._acts:
            self._change(target, now)

    def _change(self, target: int, now: float) -> None:
        """Adds or removes workers. The newest are removed first; numbers are never reused."""
        for _ in range(self.target, target):
            self._joined.append(self._next)
            self.suffer(Incident(at=now + _STARTS_S, kind="join", worker=self._next))
            self._next += 1
        for _ in range(target, self.target):
            number = self._joined.pop()
            self.suffer(Incident(at=now + _STARTS_S, kind="leave", worker=number))
        if target != self.target:
            self.targets.append(target)
        self.target = target
