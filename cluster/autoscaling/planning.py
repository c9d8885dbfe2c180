"""How many workers a load needs: for what arrives, and for what will wait when they are there."""

from __future__ import annotations

from math import exp

from cluster.autoscaling.config import AutoscalingConfig
from cluster.autoscaling.load import FleetLoad
from cluster.autoscaling.starts import StartTimes
from router.serving.load import WINDOW_S

_LEAST_RATE = 0.5
"""Least part of the meter's service rate that a worker is taken to have: a queue says that there is
too little, but hardly of how much, so the correction at most doubles what is asked for."""
_LEARN_S = 6.0 * WINDOW_S
"""Time constant in which the rate follows what is measured; long beside the meter's own, which
smears every step of the load."""
_MEAN = 0.5
"""Time constant, in start-up times, of the mean of arriving work. What comes and goes within a
start none can answer, and a rise that lasts should not wait for another one."""
_MOST_FULL = 0.9
"""Utilisation from which the headroom is taken to be no smaller: at 1.0 no backlog would ever be
worked off by it."""


class ServiceRate:
    """The service rate of a worker: work done per second, in the seconds for which the meter counts
    work.

    Where requests wait longer than they should, all workers are busy: what arrives and does not add
    to the queue is what they do. The meter weighs tokens as the step times of late have it; where
    it is right the rate is 1, where it counts 40 % too little the rate turns out as 0.6. Without a
    queue nothing is learned, and the correction is forgotten.

    Args:
        config: from which wait on requests wait too long.
        forget_s: time constant in which the rate returns to 1.
    """

    def __init__(self, config: AutoscalingConfig, forget_s: float) -> None:
        self.value = 1.0
        """Seconds of metered work per second of a worker."""
        self._longest_s = config.target_queue_delay_ms * 1e-3
        self._forget_s = forget_s
        self._last: tuple[float, float] | None = None
        """When we looked last, and the backlog then."""
        self._growth = 0.0
        """Growth of the backlog, in workers; smoothed as the meter smooths what arrives."""
        self._num_ready = 0.0
        """Smoothed in the same way."""

    def observe(self, load: FleetLoad, now: float) -> None:
        """Looks at the load of the moment."""
        last, self._last = self._last, (now, load.backlog_s)
        if last is None:
            self._num_ready = load.num_ready
            return
        passed = now - last[0]
        if passed <= 0.0:
            self._last = last
            return
        new = 1.0 - exp(-passed / WINDOW_S)
        self._growth += new * ((load.backlog_s - last[1]) / passed - self._growth)
        self._num_ready += new * (load.num_ready - self._num_ready)
        rate, constant_s = 1.0, self._forget_s
        if load.num_ready and load.queue_delay_s > self._longest_s:
            rate, constant_s = (load.work - self._growth) / self._num_ready, _LEARN_S
        rate = min(max(rate, _LEAST_RATE), 1.0)
        self.value += (1.0 - exp(-passed / constant_s)) * (rate - self.value)


class SteadyWork:
    """The arriving work that lasts, without what is over before a worker could be started for it.

    The mean over half a start-up time, or what arrives now where that is less. What rises faster
    is what the headroom is there for, as long as workers keep up with it.
    """

    def __init__(self) -> None:
        self.value = 0.0
        """Workers kept busy."""
        self._mean = 0.0
        self._last: float | None = None

    def observe(self, work: float, start_s: float, now: float) -> None:
        """Looks at what arrives while a start takes so long."""
        if self._last is None:
            self._mean = work
        elif now > self._last:
            self._mean += (1.0 - exp((self._last - now) / (_MEAN * start_s))) * (work - self._mean)
        self._last = now
        self.value = min(self._mean, work)


def workers_needed(
    load: FleetLoad, steady: float, starts: StartTimes, rate: float, config: AutoscalingConfig
) -> float:
    """Workers that a load needs, neither rounded nor bounded; those that start count as there.

    The most of three. For what arrives steadily: enough to be busy for `target_load` of their time.
    For KV caches: enough to be filled by `target_kv_usage`. For what waits: enough for all that
    waits now, and comes in the meantime, to be served by a moment that lies one start and one
    horizon ahead. A worker that is ready serves all that time, one that is starting the rest of it,
    and one that is yet to be started for the horizon.

    The horizon is so long that a step of the load asks for no more than what arrives does: at the
    target a part `1 - target_load` of each worker is idle, and works off what came during a start
    of T seconds within `T * target_load / (1 - target_load)`.

    Args:
        load: of the moment.
        steady: part of its work, see `SteadyWork`.
        starts: what is starting.
        rate: of service, see `ServiceRate`.
        config: targets.
    """
    arriving = load.work / rate
    full = min(config.target_load, _MOST_FULL)
    horizon_s = max(config.backlog_horizon_s, starts.usual_s * full / (1.0 - full))
    # Both tell of the same queue, in parts of its own each: what is not at a worker yet, and what
    # weighs more than the meter has it.
    waiting_s = max(load.backlog_s / rate, load.queue_delay_s * load.num_ready)
    span_s = starts.usual_s + horizon_s
    serve_s = [span_s - remaining_s for remaining_s in starts.remaining_s()]
    waiting = _to_serve(waiting_s + arriving * span_s, load.num_ready, span_s, serve_s, horizon_s)
    least = 1e-9 if load.active else 0.0
    return max(
        steady / rate / config.target_load,
        load.kv / config.target_kv_usage,
        waiting,
        least,
    )


def _to_serve(
    work_s: float, num_ready: int, span_s: float, serve_s: list[float], new_s: float
) -> float:
    """Workers for so much work: first those that are ready, then those that start, then others."""
    left_s = work_s - num_ready * span_s
    if left_s <= 0.0:
        return work_s / span_s
    for number, served_s in enumerate(serve_s):
        if left_s <= served_s:
            return num_ready + number + left_s / served_s
        left_s -= served_s
    return num_ready + len(serve_s) + left_s / new_s
