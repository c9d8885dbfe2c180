"""Decision of the autoscaler: the target number of a model's workers."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import ceil, floor

from cluster.autoscaling.config import AutoscalingConfig
from cluster.autoscaling.load import FleetLoad
from cluster.autoscaling.planning import ServiceRate, SteadyWork, workers_needed
from cluster.autoscaling.starts import SHORT_S, StartTimes

_BAND = 0.1
"""Tolerance around a number of workers: n workers do for a need of up to (1 + 0.1) n, and some are
stopped only where the rest does for a need that is larger by 1 / (1 - 0.1)."""
_STEP = 0.2
"""Least part by which the number of workers changes, where that is more than one worker. A load
that grows and shrinks eightfold within a day changes the number 2 ln 8 / ln 1.2 = 23 times."""
_SURE = 0.6
"""Utilization of fewer workers, relative to the targets, up to which they are much more than
enough: the others are stopped after one downscale delay."""
_DOUBT = 4.0
"""Downscale delays after which workers are stopped where fewer only just suffice: noise of the load
would soon start them again."""
_MOST_PATIENCE = 8.0
"""Largest factor of the downscale delay."""
_REGRET = 2.0
"""Downscale delays within which workers that are needed again were stopped too early."""


@dataclass(slots=True)
class _Wish:
    """A period in which fewer workers than the present ones suffice."""

    since: float
    """Time at which it began."""
    most: float
    """Most workers that were needed in it."""


class Autoscaler:
    """Autoscaler of one model: decides on the target number of workers by the model's load.

    Up: by the least need within `upscale_delay_s`, which grows in proportion where a start takes
    longer than SHORT_S, so a burst that is over by then starts no worker. Workers that are still
    starting are cancelled once the load does not need them. Down, of running workers: once the most
    that was needed within `downscale_delay_s` is much less than there are, or just less for four
    times as long. The number changes by a fifth at least. Where workers are needed again soon after
    some were stopped, the delay doubles.

    Deterministic: it has state, but no clock of its own and no randomness.

    Args:
        config: bounds, targets and delays.
    """

    def __init__(self, config: AutoscalingConfig) -> None:
        self._config = config
        self._starts = StartTimes()
        self._rate = ServiceRate(config, _MOST_PATIENCE * config.downscale_delay_s)
        self._steady = SteadyWork()
        self._least = _SlidingLeast()
        """Least number of workers that were needed within the upscale delay."""
        self._least_negative = _SlidingLeast()
        """Most workers that were needed within `_DOUBT` upscale delays, negated."""
        self._rose_at: float | None = None
        """Time of the last decision for more workers."""
        self._downs: list[_Wish | None] = [None, None]
        """Periods in which fewer workers are much more than enough, and in which they suffice."""
        self._idle_since: float | None = None
        self._fell_at: float | None = None
        """Time at which running workers were stopped last; None if more were started since."""
        self._patience = 1.0
        """Factor of the downscale delay."""

    def observe(self, target: int, running: int, now: float) -> None:
        """Updates the start-up times alone, while no load is known; `decide` does so, too."""
        self._starts.observe(target, running, now)

    def decide(self, load: FleetLoad, target: int, now: float, running: int | None = None) -> int:
        """The new target number of workers.

        Args:
            load: the present load.
            target: the present target; some of these workers may still be starting.
            now: time in seconds of a monotonic clock.
            running: workers that have started, whether or not they are ready for requests; none of
                them is cancelled. Those that are ready, if not given.
        """
        running = load.num_ready if running is None else running
        self.observe(target, running, now)
        self._rate.observe(load, now)
        self._steady.observe(load.work, self.start_s, now)
        needed = self.wanted(load)
        lasting = self._least.over(self._upscale_delay_s, needed, now)
        negative = self._least_negative.over(_DOUBT * self._upscale_delay_s, -needed, now)
        if load.active or load.visited:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        decided = self._config.bounded(target)
        if self._config.to_zero and self._idle_for(self._config.downscale_to_zero_delay_s, now):
            # Whatever the mean of past load needs. Serve sets the target to one on the way to zero:
            # there this branch decides again.
            decided = 0
        elif not target:
            # Requests wait for a first worker: no delay is added. Without any request what is left
            # of the load is the decaying mean of past load, which needs no worker.
            decided = self._config.bounded(_up_to(needed) if load.active else 0)
        elif (higher := self._higher(lasting, target, now)) > target:
            decided = higher
        elif (fewer := self._called_off(needed, negative, target, running)) < target:
            decided = fewer
        elif (lower := self._lower(needed, target, now)) < target:
            decided = lower
        if decided != target:
            self._changed(decided, target, running, now)
        return decided

    def wanted(self, load: FleetLoad) -> float:
        """Workers that a load needs, by the averages of the last decision; see `workers_needed`."""
        return workers_needed(
            load, self._steady.value, self._starts, self._rate.value, self._config
        )

    @property
    def start_s(self) -> float:
        """Seconds that a worker usually takes to start, see `StartTimes`."""
        return self._starts.usual_s

    @property
    def _upscale_delay_s(self) -> float:
        """Seconds for which more workers must be needed, in proportion to a start."""
        return self._config.upscale_delay_s * max(self.start_s / SHORT_S, 1.0)

    def _higher(self, lasting: float | None, target: int, now: float) -> int:
        """A larger target for the need that has lasted, or the present one. Stuck starts do not
        count as workers: as many more are started."""
        lost = self._starts.num_lost
        alive = target - lost
        if lasting is None or _up_to(lasting) <= alive:
            return target
        if self._rose_at is not None and now - self._rose_at < self._config.upscale_delay_s:
            return target
        more = max(ceil(lasting), ceil(alive * (1.0 + _STEP)))
        return self._config.bounded(more + lost)

    def _called_off(self, needed: float, negative: float | None, target: int, running: int) -> int:
        """A smaller target that cancels workers which are still starting, or the present one.

        At once where fewer are much more than enough, after `_DOUBT` upscale delays where they
        suffice. By two steps at least: workers cancelled for noise of the load would be needed
        again, and their start would have been in vain. Serve stops starting replicas first. The
        only worker is not cancelled: a client that gave up waiting for it will try again.
        """
        if target <= running:
            return target
        keep = _down_to(needed / _SURE)
        if negative is not None:
            keep = min(keep, _down_to(-negative))
        if max(keep, 1) > _step_below(_step_below(target)):
            return target
        return self._config.bounded(min(max(keep, running, 1), target))

    def _lower(self, needed: float, target: int, now: float) -> int:
        """A smaller target that stops running workers, or the present one."""
        decided = target
        for place, (part, times) in enumerate(((_SURE, 1.0), (1.0, _DOUBT))):
            if max(_down_to(needed / part), 1) > _step_below(target):
                self._downs[place] = None
                continue
            wish = self._downs[place]
            if wish is None:
                wish = self._downs[place] = _Wish(now, needed)
            wish.most = max(wish.most, needed)
            delay_s = self._config.downscale_delay_s * self._patience * times
            if now - wish.since >= delay_s:
                fewer = self._config.bounded(max(_down_to(wish.most / part), 1))
                decided = min(decided, fewer)
        return decided

    def _changed(self, decided: int, target: int, running: int, now: float) -> None:
        self._downs = [None, None]
        if decided < target:
            if decided < running:
                self._fell_at = now
            return
        self._rose_at = now
        if self._fell_at is not None:
            missed = now - self._fell_at < _REGRET * self._config.downscale_delay_s
            self._patience = min(self._patience * 2.0, _MOST_PATIENCE) if missed else 1.0
            self._fell_at = None

    def _idle_for(self, seconds: float, now: float) -> bool:
        return self._idle_since is not None and now - self._idle_since >= seconds


class _SlidingLeast:
    """Sliding-window minimum of a value over time."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._rising: deque[tuple[float, float]] = deque()
        """Times and values, both increasing: a value is dropped when a smaller one follows."""

    def over(self, seconds: float, value: float, now: float) -> float | None:
        """Adds a value; returns the minimum over the last `seconds`, None until as many passed."""
        if self._since is None:
            self._since = now
        while self._rising and self._rising[-1][1] >= value:
            self._rising.pop()
        self._rising.append((now, value))
        # The last value before the window is still that at its beginning.
        while len(self._rising) > 1 and self._rising[1][0] <= now - seconds:
            self._rising.popleft()
        return self._rising[0][1] if now - self._since >= seconds else None


def _up_to(wanted: float) -> int:
    """Fewest workers that do for a need, the tolerance used up."""
    return ceil(wanted / (1.0 + _BAND))


def _down_to(wanted: float) -> int:
    """Fewest workers that do for a need, the tolerance kept free."""
    return ceil(wanted / (1.0 - _BAND))


def _step_below(count: int) -> int:
    """Most workers that are a step (`_STEP`) or more below `count`."""
    return min(floor(count / (1.0 + _STEP)), count - 1)
