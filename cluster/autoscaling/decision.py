"""Autoscaler: decides the target number of a model's workers."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import ceil, floor

from cluster.autoscaling.config import AutoscalingConfig
from cluster.autoscaling.load import FleetLoad
from cluster.autoscaling.planning import ServiceRate, SteadyWork, workers_needed
from cluster.autoscaling.starts import SHORT_S, StartTimes

_BAND = 0.1
"""Relative tolerance around a number of workers: n workers suffice for a need of up to (1 + 0.1) n,
and workers are stopped only if the need is at most (1 - 0.1) n for the n that remain."""
_STEP = 0.2
"""Minimum relative change in the number of workers (at least one worker). If a load grows and
shrinks eightfold within a day, the number changes at most 2 ln 8 / ln 1.2 = 23 times.
"""
_AMPLE = 0.6
"""Maximum utilization of the remaining workers, relative to the targets, at which the others are
stopped after one downscale delay."""
_JUST_ENOUGH_DELAYS = 4.0
"""Number of downscale delays before workers are stopped if the remaining ones would be close to
their targets: after a single delay, noise in the load would often start them again. Starts in
progress are cancelled after as many upscale delays."""
_MAX_BACKOFF = 8.0
"""Maximum factor by which the downscale delay is multiplied."""
_TOO_EARLY_DELAYS = 2.0
"""Number of downscale delays: if workers are needed again within this time after a scale-down, they
were stopped too early, and the delay doubles.
"""


@dataclass(slots=True)
class _Surplus:
    """A period in which fewer workers than the current number suffice."""

    since: float
    """Time at which the period began."""
    peak: float
    """Maximum number of workers needed in the period."""


class Autoscaler:
    """Autoscaler of one model: decides the target number of workers from the model's load.

    Scaling up follows the minimum need within `upscale_delay_s` (longer in proportion if a start
    takes longer than SHORT_S), so shorter bursts start no worker. Workers that are still starting
    are cancelled when the load no longer needs them. Running workers are stopped when the maximum
    need within `downscale_delay_s` is far below their number, or when the maximum within four times
    that delay is just below it. The number changes by at least a fifth. If workers are needed again
    soon after a scale-down, the downscale delay doubles.

    Deterministic: it has state, but neither a clock nor randomness.

    Args:
        config: bounds, targets and delays.
    """

    def __init__(self, config: AutoscalingConfig) -> None:
        self._config = config
        self._starts = StartTimes()
        self._rate = ServiceRate(config, _MAX_BACKOFF * config.downscale_delay_s)
        self._steady = SteadyWork()
        self._min_need = _SlidingMinimum()
        """Minimum number of workers needed within the upscale delay."""
        self._min_negative_need = _SlidingMinimum()
        """Maximum number of workers needed within `_JUST_ENOUGH_DELAYS` upscale delays, negated."""
        self._rose_at: float | None = None
        """Time of the last decision for more workers."""
        self._surpluses: list[_Surplus | None] = [None, None]
        """Periods in which the remaining workers would be far below their targets (`_AMPLE`), and
        in which they would be close to them."""
        self._idle_since: float | None = None
        self._fell_at: float | None = None
        """Time at which running workers were last stopped; None if workers were started since."""
        self._backoff = 1.0
        """Factor by which the downscale delay is multiplied."""

    def observe(self, target: int, running: int, now: float) -> None:
        """Updates only the startup times, which `decide` also updates; used while the load is
        unknown."""
        self._starts.observe(target, running, now)

    def decide(self, load: FleetLoad, target: int, now: float, running: int | None = None) -> int:
        """The new target number of workers.

        Args:
            load: current load.
            target: current target; some of these workers may still be starting.
            now: monotonic time in seconds.
            running: number of started workers, whether or not they are ready for requests; they are
                not cancelled. Defaults to the number of ready workers.
        """
        running = load.num_ready if running is None else running
        self.observe(target, running, now)
        self._rate.observe(load, now)
        self._steady.observe(load.work, self.start_s, now)
        needed = self.needed_workers(load)
        lasting = self._min_need.over(self._upscale_delay_s, needed, now)
        negative = self._min_negative_need.over(
            _JUST_ENOUGH_DELAYS * self._upscale_delay_s, -needed, now
        )
        if load.active or load.visited:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        decided = self._config.bounded(target)
        if self._config.to_zero and self._idle_for(self._config.downscale_to_zero_delay_s, now):
            # Regardless of the mean of past load. Serve sets the target to one on the way to zero,
            # where this branch decides again.
            decided = 0
        elif not target:
            # Requests wait for the first worker, so there is no delay. Without requests the load is
            # only the decaying mean of past load, which needs no worker.
            decided = self._config.bounded(_up_to(needed) if load.active else 0)
        elif (higher := self._higher(lasting, target, now)) > target:
            decided = higher
        elif (fewer := self._cancelled(needed, negative, target, running)) < target:
            decided = fewer
        elif (lower := self._lower(needed, target, now)) < target:
            decided = lower
        if decided != target:
            self._changed(decided, target, running, now)
        return decided

    def needed_workers(self, load: FleetLoad) -> float:
        """Number of workers needed for a load, given the averages of the last decision (see
        `workers_needed`)."""
        return workers_needed(
            load, self._steady.value, self._starts, self._rate.value, self._config
        )

    @property
    def start_s(self) -> float:
        """Usual startup time of a worker in seconds (see `StartTimes`)."""
        return self._starts.usual_s

    @property
    def _upscale_delay_s(self) -> float:
        """Upscale delay in seconds, longer in proportion if a start takes longer than SHORT_S."""
        return self._config.upscale_delay_s * max(self.start_s / SHORT_S, 1.0)

    def _higher(self, lasting: float | None, target: int, now: float) -> int:
        """A larger target if more workers were needed throughout the upscale delay, otherwise the
        current one. Stuck starts do not count as workers and are replaced."""
        lost = self._starts.num_lost
        alive = target - lost
        if lasting is None or _up_to(lasting) <= alive:
            return target
        if self._rose_at is not None and now - self._rose_at < self._config.upscale_delay_s:
            return target
        more = max(ceil(lasting), ceil(alive * (1.0 + _STEP)))
        return self._config.bounded(more + lost)

    def _cancelled(self, needed: float, negative: float | None, target: int, running: int) -> int:
        """A smaller target that cancels workers that are still starting, or the current one.

        Workers are cancelled immediately if the others would be far below their targets, and after
        `_JUST_ENOUGH_DELAYS` upscale delays if they would be close to them. The target falls by at
        least two steps, since workers that are cancelled due to noise in the load would be needed
        again. Serve first stops the replicas that are starting. A single worker is not cancelled,
        since clients that gave up waiting for it will retry.
        """
        if target <= running:
            return target
        keep = _down_to(needed / _AMPLE)
        if negative is not None:
            keep = min(keep, _down_to(-negative))
        if max(keep, 1) > _step_below(_step_below(target)):
            return target
        return self._config.bounded(min(max(keep, running, 1), target))

    def _lower(self, needed: float, target: int, now: float) -> int:
        """A smaller target that stops running workers, or the current one."""
        decided = target
        for index, (usage, delays) in enumerate(((_AMPLE, 1.0), (1.0, _JUST_ENOUGH_DELAYS))):
            if max(_down_to(needed / usage), 1) > _step_below(target):
                self._surpluses[index] = None
                continue
            surplus = self._surpluses[index]
            if surplus is None:
                surplus = self._surpluses[index] = _Surplus(now, needed)
            surplus.peak = max(surplus.peak, needed)
            delay_s = self._config.downscale_delay_s * self._backoff * delays
            if now - surplus.since >= delay_s:
                fewer = self._config.bounded(max(_down_to(surplus.peak / usage), 1))
                decided = min(decided, fewer)
        return decided

    def _changed(self, decided: int, target: int, running: int, now: float) -> None:
        self._surpluses = [None, None]
        if decided < target:
            if decided < running:
                self._fell_at = now
            return
        self._rose_at = now
        if self._fell_at is not None:
            too_early = now - self._fell_at < _TOO_EARLY_DELAYS * self._config.downscale_delay_s
            self._backoff = min(self._backoff * 2.0, _MAX_BACKOFF) if too_early else 1.0
            self._fell_at = None

    def _idle_for(self, seconds: float, now: float) -> bool:
        return self._idle_since is not None and now - self._idle_since >= seconds


class _SlidingMinimum:
    """Sliding-window minimum of a value over time."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._rising: deque[tuple[float, float]] = deque()
        """Times and values, both increasing: larger values are dropped when a smaller one is
        added."""

    def over(self, seconds: float, value: float, now: float) -> float | None:
        """Adds a value; returns the minimum over the last `seconds`, or None until that much time
        has passed."""
        if self._since is None:
            self._since = now
        while self._rising and self._rising[-1][1] >= value:
            self._rising.pop()
        self._rising.append((now, value))
        # The last value before the window is the value at its beginning.
        while len(self._rising) > 1 and self._rising[1][0] <= now - seconds:
            self._rising.popleft()
        return self._rising[0][1] if now - self._since >= seconds else None


def _up_to(needed: float) -> int:
    """Minimum number of workers when scaling up: `needed` may exceed this number by `_BAND`."""
    return ceil(needed / (1.0 + _BAND))


def _down_to(needed: float) -> int:
    """Minimum number of workers when scaling down: `needed` is below this number by `_BAND`."""
    return ceil(needed / (1.0 - _BAND))


def _step_below(count: int) -> int:
    """Maximum number of workers that is at least one step (`_STEP`) below `count`."""
    return min(floor(count / (1.0 + _STEP)), count - 1)
