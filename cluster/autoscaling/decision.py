"""The decision: how many workers a model should have."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from cluster.autoscaling.config import AutoscalingConfig
from cluster.autoscaling.load import FleetLoad

_BAND = 0.1
"""Around whole numbers of workers: so much over what n can do is still theirs, and n - 1 must be
so much more than enough before one goes."""
_SURE = 0.6
_DOUBT = 4.0
"""Fewer workers go after one delay where the load leaves them so much below what they can do, and
after so many delays where they only just suffice: noise would have them back soon."""
_MOST_AT_ONCE = 2.0
"""Times as many workers that a queue asks for at once: how long it is says little of how much."""
_MOST_PATIENCE = 8.0
_REGRET = 2.0
"""In downscale delays: more workers wanted sooner after some have gone mean that they were
missed."""


@dataclass(slots=True)
class _Wish:
    """A number of workers other than the present one that has been wanted for a while."""

    since: float
    least: float
    """Of what was wanted in that time."""
    most: float

    def add(self, wanted: float) -> None:
        self.least = min(self.least, wanted)
        self.most = max(self.most, wanted)


class Autoscaler:
    """Follows the load of one model: up within seconds, down after minutes.

    More workers are started once the least that was wanted for `upscale_delay_s` is more than there
    are; fewer remain once the most that was wanted for `downscale_delay_s` is much less, or just
    less for four times as long. So load that comes and goes within that time keeps its workers, and
    at most two changes of direction fit into one such delay. Where workers that were let go are
    soon missed, the delay doubles.

    Pure but for what it remembers: no clock of its own, no randomness.

    Args:
        config: bounds, targets and delays.
    """

    def __init__(self, config: AutoscalingConfig) -> None:
        self._config = config
        self._up: _Wish | None = None
        self._downs: list[_Wish | None] = [None, None]
        """Where fewer are plenty, and where they suffice."""
        self._idle_since: float | None = None
        self._fell_at: float | None = None
        """When workers were let go last, unless more were started since."""
        self._patience = 1.0

    def decide(self, load: FleetLoad, target: int, now: float) -> int:
        """How many workers there should be.

        Args:
            load: of the moment.
            target: how many there should be so far; some of them may not be up yet.
            now: seconds on any clock that does not go back.
        """
        # While workers are starting, what waits has been answered; only what comes asks for more.
        more = self.wanted(load, waiting=load.num_ready >= target)
        enough = self.wanted(load)
        if load.active or load.visited:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        decided = self._config.bounded(target)
        if not target:
            # Whoever waits finds no worker at all, and a delay would add to that. Where nobody
            # does, what there is of load is the tail of a mean over what is over.
            decided = self._config.bounded(_up_to(more) if load.active else 0)
        elif (higher := self._higher(more, target, now)) > target:
            decided = higher
        elif (lower := self._lower(enough, target, now)) < target:
            decided = lower
        if decided != target:
            self._changed(decided > target, now)
        return decided

    def wanted(self, load: FleetLoad, *, waiting: bool = True) -> float:
        """Workers that a load needs by itself, not rounded and not bounded.

        Args:
            load: of the moment.
            waiting: whether what waits counts, beside what arrives.
        """
        config = self._config
        work, delay = load.work, 0.0
        if waiting:
            work += load.backlog_s / config.backlog_horizon_s
            excess = load.queue_delay_s * 1e3 / config.target_queue_delay_ms
            delay = load.num_ready * min(excess, _MOST_AT_ONCE) if excess > 1.0 else 0.0
        least = 1e-9 if load.active else 0.0
        return max(work / config.target_load, load.kv / config.target_kv_usage, delay, least)

    def _higher(self, wanted: float, target: int, now: float) -> int:
        if _up_to(wanted) <= target:
            self._up = None
            return target
        self._up = _noted(self._up, wanted, now)
        if now - self._up.since < self._config.upscale_delay_s:
            return target
        return self._config.bounded(_up_to(self._up.least))

    def _lower(self, wanted: float, target: int, now: float) -> int:
        if self._idle_for(self._config.downscale_to_zero_delay_s, now) and self._config.to_zero:
            return 0
        decided = target
        for place, (part, times) in enumerate(((_SURE, 1.0), (1.0, _DOUBT))):
            if max(_down_to(wanted / part), 1) >= target:
                self._downs[place] = None
                continue
            wish = self._downs[place] = _noted(self._downs[place], wanted, now)
            delay_s = self._config.downscale_delay_s * self._patience * times
            if now - wish.since >= delay_s:
                fewer = self._config.bounded(max(_down_to(wish.most / part), 1))
                decided = min(decided, fewer)
        return decided

    def _changed(self, up: bool, now: float) -> None:
        self._up, self._downs = None, [None, None]
        if not up:
            self._fell_at = now
        elif self._fell_at is not None:
            missed = now - self._fell_at < _REGRET * self._config.downscale_delay_s
            self._patience = min(self._patience * 2.0, _MOST_PATIENCE) if missed else 1.0
            self._fell_at = None

    def _idle_for(self, seconds: float, now: float) -> bool:
        return self._idle_since is not None and now - self._idle_since >= seconds


def _noted(wish: _Wish | None, wanted: float, now: float) -> _Wish:
    if wish is None:
        return _Wish(now, wanted, wanted)
    wish.add(wanted)
    return wish


def _up_to(wanted: float) -> int:
    """Fewest workers that are not too few."""
    return ceil(wanted / (1.0 + _BAND))


def _down_to(wanted: float) -> int:
    """Fewest workers that are plenty."""
    return ceil(wanted / (1.0 - _BAND))
