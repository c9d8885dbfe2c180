"""How many requests are delayed by a second of work that need not be done."""

from __future__ import annotations

from math import exp, sqrt

import numpy as np

from router.fleet.constants import BUSIEST, WINDOW_S
from router.fleet.workers import Floats

# Arrays: numpy converts any other number with each use.
_ONE, _BUSIEST = np.array(1.0), np.array(BUSIEST)


class Congestion:
    """Counts delayed requests from utilisations ρ, queues W and the mean work S of a request.

    `anywhere`: β = ρ/(1 - ρ)·(P + W/S), with the mean ρ and the shortest queue W. Work at the end
    of a queue delays whoever comes until the queue has run empty. At a single worker that are
    λ·(W + S)/(1 - ρ) requests, where λ·S = ρ: in overload ever more. All workers count as one,
    since requests can go where the queue is shortest. While no queue stands there, those who come
    during the work itself are delayed only if all other workers are busy too, which of n happens
    with a probability of about P = ρ^(√(2(n + 1)) - 2), 1 of a single one (Sakasegawa 1977, An
    approximation formula Lq ≈ αρ^β/(1 - ρ)). A fleet that is half idle computes a prefix again at
    the price of its time.

    `at_workers`: ρ·(1 + W/S), with each worker's own ρ and W. Those who come to a worker for the
    prefixes that it has come whoever else is idle, λ·(W + S) of them until its queue is done.
    So what is new settles where least is asked for, and moves the less, the busier the place.
    """

    def __init__(self) -> None:
        self._work_s = 0.0
        self._requests = 0.0
        """Sums over requests that were placed, older ones weighing less, as they stood ..."""
        self._at = 0.0
        """... at this time."""

    def placed(self, work_s: float, now: float) -> None:
        """A request with so much work was given to a worker."""
        kept = exp(min(self._at - now, 0.0) / WINDOW_S)
        self._work_s = self._work_s * kept + work_s
        self._requests = self._requests * kept + 1.0
        self._at = now

    def anywhere(self, utilisation: float, num_workers: int, queue_s: float) -> float:
        """Requests that a second of work delays, wherever it is done.

        Args:
            utilisation: mean of the workers.
            num_workers: how many can take a request.
            queue_s: the shortest of their queues.
        """
        busy = min(utilisation, BUSIEST)
        all_busy: float = busy ** (sqrt(2.0 * (num_workers + 1)) - 2.0)
        return busy / (1.0 - busy) * (all_busy + queue_s * self._rate)

    def at_workers(self, utilisations: Floats, queues_s: Floats) -> Floats:
        """Requests bound to each worker that a second of work there delays."""
        delayed = queues_s * self._rate
        delayed += _ONE
        delayed *= np.minimum(utilisations, _BUSIEST)
        return delayed

    @property
    def _rate(self) -> float:
        """1/S: requests per second of work; 0 before there was one."""
        return self._requests / self._work_s if self._work_s else 0.0
