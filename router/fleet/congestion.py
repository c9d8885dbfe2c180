"""How many requests are delayed by a second of work that need not be done."""

from __future__ import annotations

from math import exp, sqrt

from router.fleet.utilisation import Utilisation

_BUSIEST = 0.98
"""Utilisation is not known better than that."""
_WINDOW_S = 3.0
"""Time after which a queue that was seen weighs 1/e."""
_GAIN = 0.02
"""Weight of a new request in the mean work of one."""


class Congestion:
    """β = ρ/(1 − ρ)·(P + W/S), with utilisation ρ, mean queue W and mean work S of a request.

    Work at the end of a queue delays whoever comes until the queue has run empty. At a single
    worker that are λ·(W + S)/(1 − ρ) requests, where λ·S = ρ: in overload ever more, while ρ alone
    has long been as high as it gets. All workers together count as one, since requests can go
    elsewhere.

    While no queue stands, those who come during the work itself are delayed only if all other
    workers are busy too, which of n happens with a probability of about P = ρ^(√(2(n + 1)) − 2), 1
    of a single one (Sakasegawa 1977, An approximation formula Lq ≈ αρ^β/(1 − ρ)). A fleet that is
    half idle computes a prefix again at the price of its time.

    Args:
        utilisation: of the fleet.
    """

    def __init__(self, utilisation: Utilisation) -> None:
        self._utilisation = utilisation
        self._queue_s = 0.0
        self._work_s = 0.0
        self._at = 0.0

    def delayed(self, queue_s: float, now: float) -> float:
        """Requests that a second of work delays; `queue_s` is the mean over the workers now.

        Requests of one moment are no queue to each other: only the first is counted.
        """
        passed = now - self._at
        if passed > 0.0:
            self._queue_s += (1.0 - exp(-passed / _WINDOW_S)) * (queue_s - self._queue_s)
            self._at = now
        busy = min(self._utilisation.at(now), _BUSIEST)
        ahead = self._queue_s / self._work_s if self._work_s else 0.0
        all_busy: float = busy ** (sqrt(2.0 * (max(self._utilisation.num_workers, 1) + 1)) - 2.0)
        return busy / (1.0 - busy) * (all_busy + ahead)

    def placed(self, work_s: float) -> None:
        """A request with so much work was given to a worker."""
        gain = _GAIN if self._work_s else 1.0
        self._work_s += gain * (work_s - self._work_s)
