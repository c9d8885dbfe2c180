"""Number of workers needed for a load, from its arriving work, KV cache usage and backlog."""

from __future__ import annotations

from math import exp

from cluster.autoscaling.config import AutoscalingConfig
from cluster.autoscaling.load import FleetLoad
from cluster.autoscaling.starts import StartTimes
from router.serving.load import WINDOW_S

_MIN_RATE = 0.5
"""Lower bound on the service rate: a queue shows that there are too few workers, but not how many
more are needed, so the correction at most doubles their number."""
_LEARN_S = 6.0 * WINDOW_S
"""Time constant in seconds of the measured service rate; long compared with WINDOW_S, over which
the meter averages the load."""
_MEAN = 0.5
"""Time constant of the mean of arriving work, in startup times: workers started for a shorter burst
would come too late, and a lasting rise should not wait for a second start."""
_MAX_UTILIZATION = 0.9
"""Upper bound on the utilization in the horizon's formula: at 1.0 there would be no idle time to
clear a backlog."""


class ServiceRate:
    """Measured service rate of a worker: seconds of metered work per second.

    While the queueing delay exceeds its target, all workers are busy: they complete the arriving
    work minus the growth of the backlog. The meter (`router.serving.load`) weighs tokens by fitted
    step times; the rate is 1 if these are correct, and 0.6 if workers only complete 60 % of the
    metered work. Without a queue, the rate cannot be measured and returns to 1.

    Args:
        config: autoscaling options; only `target_queue_delay_ms` is used.
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
        """Growth of the backlog in seconds of work per second, smoothed over the same window as the
        arriving work."""
        self._num_ready = 0.0
        """Number of ready workers, smoothed in the same way."""

    def observe(self, load: FleetLoad, now: float) -> None:
        """Updates the rate with the current load."""
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
        rate = min(max(rate, _MIN_RATE), 1.0)
        self.value += (1.0 - exp(-passed / constant_s)) * (rate - self.value)


class SteadyWork:
    """Arriving work, excluding bursts that are shorter than the start of a worker.

    It is the mean over half a startup time, or the current work if that is less. Faster rises are
    covered by the headroom of `target_load`.
    """

    def __init__(self) -> None:
        self.value = 0.0
        """Number of workers kept busy by the steady work."""
        self._mean = 0.0
        self._last: float | None = None

    def observe(self, work: float, start_s: float, now: float) -> None:
        """Updates the mean with the current arriving work; `start_s` is the usual startup time."""
        if self._last is None:
            self._mean = work
        elif now > self._last:
            self._mean += (1.0 - exp((self._last - now) / (_MEAN * start_s))) * (work - self._mean)
        self._last = now
        self.value = min(self._mean, work)


def workers_needed(
    load: FleetLoad, steady: float, starts: StartTimes, rate: float, config: AutoscalingConfig
) -> float:
    """Number of workers needed for a load, including ready and starting ones, neither rounded nor
    bounded.

    It is the maximum of three numbers: for steady work, the workers busy for `target_load` of their
    time; for KV caches, those filled to `target_kv_usage`; for the backlog, those that complete all
    work that is queued now or arrives within one startup time plus one horizon. In that time, a
    ready worker serves throughout, a starting one for the remainder, and a new one for the horizon.

    The horizon is at least `backlog_horizon_s`, and long enough that a step in the load needs no
    more workers for the backlog than for steady work: at the target, a fraction `1 - target_load`
    of each worker is idle, which clears what arrives during a start of T seconds within
    `T * target_load / (1 - target_load)`.

    Args:
        load: current load.
        steady: steady part of its work (see `SteadyWork`).
        starts: starting workers, and the usual startup time.
        rate: service rate of a worker (see `ServiceRate`).
        config: targets and horizon.
    """
    arriving = load.work / rate
    busy = min(config.target_load, _MAX_UTILIZATION)
    horizon_s = max(config.backlog_horizon_s, starts.usual_s * busy / (1.0 - busy))
    # Two estimates of the same queue: the backlog includes requests that are still at gateways, the
    # delay also work that the meter underestimates.
    waiting_s = max(load.backlog_s / rate, load.queue_delay_s * load.num_ready)
    span_s = starts.usual_s + horizon_s
    serve_s = [span_s - remaining_s for remaining_s in starts.remaining_s()]
    waiting = _to_serve(waiting_s + arriving * span_s, load.num_ready, span_s, serve_s, horizon_s)
    minimum = 1e-9 if load.active else 0.0
    return max(
        steady / rate / config.target_load,
        load.kv / config.target_kv_usage,
        waiting,
        minimum,
    )


def _to_serve(
    work_s: float, num_ready: int, span_s: float, serve_s: list[float], new_s: float
) -> float:
    """Number of workers needed for an amount of work: ready ones, then starting ones, then new
    ones.

    Args:
        work_s: seconds of work.
        num_ready: workers that are ready.
        span_s: seconds that each ready worker is available.
        serve_s: seconds that each starting worker is available, longest first.
        new_s: seconds that each new worker is available.
    """
    left_s = work_s - num_ready * span_s
    if left_s <= 0.0:
        return work_s / span_s
    for number, served_s in enumerate(serve_s):
        if left_s <= served_s:
            return num_ready + number + left_s / served_s
        left_s -= served_s
    return num_ready + len(serve_s) + left_s / new_s
