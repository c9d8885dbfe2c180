"""Number of workers that a load needs, by arriving work, KV caches and backlog."""

from __future__ import annotations

from math import exp

from cluster.autoscaling.config import AutoscalingConfig
from cluster.autoscaling.load import FleetLoad
from cluster.autoscaling.starts import StartTimes
from router.serving.load import WINDOW_S

_LEAST_RATE = 0.5
"""Lower bound of the service rate: a queue shows that there are too few workers, but hardly how
many more are needed, so the correction at most doubles their number."""
_LEARN_S = 6.0 * WINDOW_S
"""Time constant in seconds of the measured service rate; long compared with the meter's window,
over which every step of the load is smeared."""
_MEAN = 0.5
"""Time constant of the mean of arriving work, in start-up times: no new worker could serve work
that comes and goes within one start, and a rise that lasts should not wait for a second start."""
_MOST_FULL = 0.9
"""Upper bound of the utilization in the horizon's formula: at 1.0 no idle time would be left to
work off a backlog."""


class ServiceRate:
    """Measured service rate of a worker: seconds of metered work that it does per second.

    While the queueing delay exceeds its target, all workers are busy: they do the arriving work
    less the growth of the backlog. The meter (`router.serving.load`) weighs tokens by fitted step
    times; the rate is 1 where these are right, and 0.6 where workers do only 60 % of what the meter
    expects of them. Without a queue the rate cannot be measured, and returns to 1.

    Args:
        config: its `target_queue_delay_ms` is used.
        forget_s: time constant in seconds of the return to 1.
    """

    def __init__(self, config: AutoscalingConfig, forget_s: float) -> None:
        self.value = 1.0
        """Seconds of metered work per second of a worker."""
        self._longest_s = config.target_queue_delay_ms * 1e-3
        self._forget_s = forget_s
        self._last: tuple[float, float] | None = None
        """Time and backlog of the last observation."""
        self._growth = 0.0
        """Growth of the backlog in workers, smoothed over the same window as the arriving work."""
        self._num_ready = 0.0
        """Number of ready workers, smoothed likewise."""

    def observe(self, load: FleetLoad, now: float) -> None:
        """Updates the rate by the present load."""
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
    """Arriving work without bursts that are over before a worker could be started for them.

    It is the mean over half a start-up time, or the present work if that is less. For faster rises
    there is the headroom that `target_load` leaves.
    """

    def __init__(self) -> None:
        self.value = 0.0
        """Number of workers that the steady work keeps busy."""
        self._mean = 0.0
        self._last: float | None = None

    def observe(self, work: float, start_s: float, now: float) -> None:
        """Updates the mean by the present arriving work; `start_s` is the usual start-up time."""
        if self._last is None:
            self._mean = work
        elif now > self._last:
            self._mean += (1.0 - exp((self._last - now) / (_MEAN * start_s))) * (work - self._mean)
        self._last = now
        self.value = min(self._mean, work)


def workers_needed(
    load: FleetLoad, steady: float, starts: StartTimes, rate: float, config: AutoscalingConfig
) -> float:
    """Workers that a load needs, ready and starting ones included, neither rounded nor bounded.

    The largest of three numbers. For steady work: as many as are busy for `target_load` of their
    time. For KV caches: as many as are filled to `target_kv_usage`. For the backlog: as many as
    serve all that is queued now and arrives meanwhile within one start-up time and one horizon.
    There a ready worker serves for the whole time, a starting one for the rest of it, and one yet
    to be started for the horizon.

    The horizon is `backlog_horizon_s`, or longer, so that a step of the load needs no more workers
    for the backlog than for steady work: at the target a part `1 - target_load` of each worker is
    idle, and works off what arrived during a start of T seconds within
    `T * target_load / (1 - target_load)`.

    Args:
        load: the present load.
        steady: steady part of its work, see `SteadyWork`.
        starts: starting workers, and the usual start-up time.
        rate: service rate of a worker, see `ServiceRate`.
        config: targets and horizon.
    """
    arriving = load.work / rate
    full = min(config.target_load, _MOST_FULL)
    horizon_s = max(config.backlog_horizon_s, starts.usual_s * full / (1.0 - full))
    # Two estimates of the same queue: the backlog covers requests that are still at gateways, the
    # delay also work that the meter underrates.
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
    """Number of workers that do so much work: of the ready ones, then starting ones, then new ones.

    Args:
        work_s: seconds of work.
        num_ready: workers that are ready.
        span_s: seconds that each ready worker serves.
        serve_s: seconds that each starting worker serves, longest first.
        new_s: seconds that each new worker serves.
    """
    left_s = work_s - num_ready * span_s
    if left_s <= 0.0:
        return work_s / span_s
    for number, served_s in enumerate(serve_s):
        if left_s <= served_s:
            return num_ready + number + left_s / served_s
        left_s -= served_s
    return num_ready + len(serve_s) + left_s / new_s
