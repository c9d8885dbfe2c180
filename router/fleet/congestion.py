"""Congestion: how many later requests a second of prefill work delays."""

from __future__ import annotations

from math import exp, sqrt

import numpy as np

from router.fleet.constants import BUSIEST, WINDOW_S
from router.fleet.workers import Floats

# Arrays: numpy converts any other number on each use.
_ONE, _BUSIEST = np.array(1.0), np.array(BUSIEST)


class Congestion:
    """Number of requests delayed, given utilization ρ, queue W (s) and mean work S (s) per request.

    `anywhere`: requests that could run on any worker, β = ρ/(1 - ρ)·(P + W/S), with the mean ρ and
    the shortest queue W. Work at the end of a queue delays all requests that arrive before the
    queue is empty. On a single worker these are λ·(W + S)/(1 - ρ), with the arrival rate λ = ρ/S.
    All workers count as one, since such requests go to the shortest queue. Without a queue,
    requests that arrive during the work are delayed only if all other workers are busy too: with n
    workers this has a probability of about P = ρ^(√(2(n + 1)) - 2), 1 for n = 1 (Sakasegawa 1977,
    An approximation formula Lq ≈ αρ^β/(1 - ρ)). In a half-idle fleet, recomputing a prefix
    therefore costs little more than the time it takes.

    `at_workers`: requests routed to a worker for its cache, ρ·(1 + W/S), with each worker's own ρ
    and W: λ·(W + S) of them arrive until its queue is empty, even if other workers are idle. New
    prefixes therefore settle on workers with little such traffic.
    """

    def __init__(self) -> None:
        self._work_s = 0.0
        """Seconds of work of placed requests, decaying with WINDOW_S, as of `_at`."""
        self._requests = 0.0
        """Number of placed requests, decaying with WINDOW_S, as of `_at`."""
        self._at = 0.0
        """Time of the last request, on the fleet's clock."""

    def placed(self, work_s: float, now: float) -> None:
        """Records a placed request, whose prompt takes `work_s` seconds."""
        kept = exp(min(self._at - now, 0.0) / WINDOW_S)
        self._work_s = self._work_s * kept + work_s
        self._requests = self._requests * kept + 1.0
        self._at = now

    def anywhere(self, utilisation: float, num_workers: int, queue_s: float) -> float:
        """Requests that could run on any worker and are delayed by a second of work on one.

        Args:
            utilisation: mean utilization of the workers, 0 to 1.
            num_workers: number of workers that can accept a request.
            queue_s: length of the shortest queue, in seconds.
        """
        busy = min(utilisation, BUSIEST)
        all_busy: float = busy ** (sqrt(2.0 * (num_workers + 1)) - 2.0)
        return busy / (1.0 - busy) * (all_busy + queue_s * self._rate)

    def at_workers(self, utilisations: Floats, queues_s: Floats) -> Floats:
        """Requests routed to a worker for its cache and delayed by a second of work there, per
        row."""
        delayed = queues_s * self._rate
        delayed += _ONE
        delayed *= np.minimum(utilisations, _BUSIEST)
        return delayed

    @property
    def _rate(self) -> float:
        """1/S: requests per second of work; 0 before the first request."""
        return self._requests / self._work_s if self._work_s else 0.0
