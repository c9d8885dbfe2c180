"""The decision: how many workers a model should have."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import ceil, floor

from cluster.autoscaling.config import AutoscalingConfig
from cluster.autoscaling.load import FleetLoad
from cluster.autoscaling.planning import ServiceRate, SteadyWork, workers_needed
from cluster.autoscaling.starts import SHORT_S, StartTimes

_BAND = 0.1
"""Around numbers of workers: so much over what n can do is still theirs, and n - 1 must be so much
more than enough before one goes."""
_STEP = 0.2
"""Least part by which a number of workers changes, where that is more than one. A load that grows
and shrinks eightfold within a day changes it 2 ln 8 / ln 1.2 = 23 times."""
_SURE = 0.6
_DOUBT = 4.0
"""Fewer workers go after one delay where the load leaves them so much below what they can do, and
after so many delays where they only just suffice: noise would have them back soon."""
_MOST_PATIENCE = 8.0
_REGRET = 2.0
"""Window of regret, in downscale delays: more workers wanted again so soon after some have gone
mean that they were missed."""


@dataclass(slots=True)
class _Wish:
    """Fewer workers than the present ones have sufficed for a while."""

    since: float
    most: float
    """Most workers that were needed in that time."""


class Autoscaler:
    """Follows the load of one model: up once it has lasted a part of a start, down after minutes.

    More workers are started for the least that was needed for `upscale_delay_s`, which is longer
    in proportion where workers take longer to start than a short start: a burst that is over by
    then buys nothing. Those that do not run yet serve nobody, and are called off once the load
    no longer needs them. Of those that run fewer remain once the most that was needed for
    `downscale_delay_s` is much less, or just less for four times as long. Numbers change in steps
    of a fifth at least. So load that comes and goes within that time keeps its workers, and where
    workers that were let go are soon missed, the delay doubles.

    Pure but for what it remembers: no clock of its own, no randomness.

    Args:
        config: bounds, targets and delays.
    """

    def __init__(self, config: AutoscalingConfig) -> None:
        self._config = config
        self._starts = StartTimes()
        self._rate = ServiceRate(config, _MOST_PATIENCE * config.downscale_delay_s)
        self._steady = SteadyWork()
        self._least = _SlidingLeast()
        """Least workers that were needed while more may be started."""
        self._least_negative = _SlidingLeast()
        """The most, with its sign turned, while some that start may be called off."""
        self._rose_at: float | None = None
        self._downs: list[_Wish | None] = [None, None]
        """Wishes for fewer workers: where these are plenty, and where they just suffice."""
        self._idle_since: float | None = None
        self._fell_at: float | None = None
        """When workers were let go last, unless more were started since."""
        self._patience = 1.0

    def observe(self, target: int, running: int, now: float) -> None:
        """Looks at workers while nothing is known of the load; `decide` does so, too."""
        self._starts.observe(target, running, now)

    def decide(self, load: FleetLoad, target: int, now: float, running: int | None = None) -> int:
        """How many workers there should be.

        Args:
            load: of the moment.
            target: how many there should be so far; some of them may not be up yet.
            now: seconds on any clock that does not go back.
            running: workers that have started, whether or not they take requests at the moment;
                none of them is called off. Those that are ready, if not given.
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
            # Serve goes there by way of one, for which the mean of what is over is too much.
            decided = 0
        elif not target:
            # Whoever waits finds no worker at all, and a delay would add to that. Where nobody
            # does, what there is of load is the tail of a mean over what is over.
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
        """Workers that a load needs as of the last decision; see `workers_needed`."""
        return workers_needed(
            load, self._steady.value, self._starts, self._rate.value, self._config
        )

    @property
    def start_s(self) -> float:
        """Seconds that a worker takes to start, as measured."""
        return self._starts.usual_s

    @property
    def _upscale_delay_s(self) -> float:
        """Seconds for which more must be needed: the same part of every start."""
        return self._config.upscale_delay_s * max(self.start_s / SHORT_S, 1.0)

    def _higher(self, lasting: float | None, target: int, now: float) -> int:
        """Stuck starts stand for no worker: as many more are wanted."""
        lost = self._starts.num_lost
        alive = target - lost
        if lasting is None or _up_to(lasting) <= alive:
            return target
        if self._rose_at is not None and now - self._rose_at < self._config.upscale_delay_s:
            return target
        more = max(ceil(lasting), ceil(alive * (1.0 + _STEP)))
        return self._config.bounded(more + lost)

    def _called_off(self, needed: float, negative: float | None, target: int, running: int) -> int:
        """Workers that start go at once where they are plenty, and soon where fewer suffice.

        By two steps at least: those that noise alone makes look superfluous will be wanted back,
        and what they have done of their start would be lost. Serve stops first what does not run
        yet. The first worker of all is not called off: whoever gave up waiting for it comes again.
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
    """The least of a value over the last seconds."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._rising: deque[tuple[float, float]] = deque()
        """Times and values; those that a later one undercuts are gone."""

    def over(self, seconds: float, value: float, now: float) -> float | None:
        """Takes a value; None while we have not looked for so long."""
        if self._since is None:
            self._since = now
        while self._rising and self._rising[-1][1] >= value:
            self._rising.pop()
        self._rising.append((now, value))
        # The last one before the window held when it began.
        while len(self._rising) > 1 and self._rising[1][0] <= now - seconds:
            self._rising.popleft()
        return self._rising[0][1] if now - self._since >= seconds else None


def _up_to(wanted: float) -> int:
    """Fewest workers that are not too few."""
    return ceil(wanted / (1.0 + _BAND))


def _down_to(wanted: float) -> int:
    """Fewest workers that are plenty."""
    return ceil(wanted / (1.0 - _BAND))


def _step_below(count: int) -> int:
    """Most workers that are a step fewer."""
    return min(floor(count / (1.0 + _STEP)), count - 1)
