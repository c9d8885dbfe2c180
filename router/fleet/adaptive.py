"""AdaptivePolicy, the default: the cost of a worker is how long this and other requests wait."""

from __future__ import annotations

import numpy as np

from router.fleet.base import RoutingPolicy, Terms
from router.fleet.congestion import Congestion
from router.fleet.constants import TOLERANCE
from router.fleet.popularity import PrefixPopularity
from router.fleet.request import Estimate, RequestView
from router.fleet.utilisation import Utilisation
from router.fleet.workers import Floats, WorkerTable


class AdaptivePolicy(RoutingPolicy):
    """The default policy: a worker's cost is the time that the request and others wait, in seconds.

    cost = queue + slot + compute + adapter + delays-anywhere + delays-worker - copy

    - queue: seconds that other prompts delay the request's prefill, `Estimate.delay_s`;
    - slot: seconds until a batch slot is free;
    - compute: seconds to compute the prompt, `Estimate.work_s`;
    - adapter: seconds to load the request's LoRA adapter, `RequestView.adapter_s`; so an adapter is
      loaded on another worker if requests would queue for longer than that takes;
    - delays-anywhere: seconds that the work delays requests that could run on any worker (see
      Congestion); a fast worker delays more of them in the same time than a slow one;
    - delays-worker: seconds that the work delays requests routed to this worker for its cache;
    - copy: seconds that later requests with a popular prefix save if this worker also caches it.
      The prefix is predicted to recur as often as recently, each time waiting for the shortest
      queue of a worker that has it. The saving is limited to the cost of making the copy, and is 0
      once the prefix has as many copies as its share of all requests justifies.

    Args:
        utilisation: utilization of the workers.
    """

    tolerance = TOLERANCE

    def __init__(self, utilisation: Utilisation) -> None:
        self._utilisation = utilisation
        self._congestion = Congestion()
        self._popularity = PrefixPopularity()

    def observe(self, request: RequestView, work_s: float, now: float) -> None:
        """Records the request's work and the use of its prefix; see RoutingPolicy.observe."""
        self._congestion.placed(work_s, now)
        if shared := request.shared_block:
            self._popularity.observe(shared, now)

    def observe_prefix(self, block_hash: int, now: float) -> None:
        """Records the use of a prefix by another gateway; see RoutingPolicy.observe_prefix."""
        self._popularity.observe(block_hash, now)

    def terms(
        self, request: RequestView, estimate: Estimate, workers: WorkerTable, now: float
    ) -> Terms:
        """The terms in seconds; see RoutingPolicy.terms."""
        eligible, queue_s, work_s = request.eligible, estimate.queue_s, estimate.work_s
        num_workers = int(np.count_nonzero(eligible)) or 1
        utilisations = self._utilisation.of_workers(len(queue_s), now)
        # Not a dot product: BLAS would wake its threads for ten thousand workers.
        busy = np.add.reduce(utilisations, where=eligible).item() / num_workers
        shortest_s = np.minimum.reduce(queue_s, where=eligible, initial=np.inf).item()
        beta = self._congestion.anywhere(busy, num_workers, shortest_s)
        delays_anywhere = beta * workers.relative_speed
        delays_worker = self._congestion.at_workers(utilisations, queue_s)
        terms = {"queue": estimate.delay_s, "slot": estimate.slot_wait_s, "compute": work_s}
        if request.adapter_s is not None:
            terms["adapter"] = request.adapter_s
        saving = self._copy_saving(request, queue_s, num_workers, now)
        if saving is not None:
            price = _copy_s(request, workers) * (1.0 + delays_anywhere + delays_worker)
            terms["copy"] = -np.minimum(saving, price)
        terms["delays-anywhere"] = delays_anywhere * work_s
        terms["delays-worker"] = delays_worker * work_s
        return terms

    def _copy_saving(
        self, request: RequestView, queue_s: Floats, num_workers: int, now: float
    ) -> Floats | None:
        """Seconds that later requests save if the worker also caches the shared prefix, per row.

        None if no worker's copy saves anything.
        """
        shared = request.shared_block
        if not shared:
            return None
        times, share = self._popularity.recurrence(shared, now)
        if not times:
            return None
        # A worker with half of the prefix counts as having it: most of a copy is there.
        holders = request.eligible & (request.hit_tokens >= 0.5 * request.best_hit)
        num_holders = np.count_nonzero(holders)
        if not num_holders or num_holders + 0.5 > share * num_workers:  # rounded
            return None
        shorter = np.maximum(queue_s[holders].min() - queue_s, 0.0)
        saving: Floats = shorter * (times / (num_holders + 1))
        return saving


def _copy_s(request: RequestView, workers: WorkerTable) -> Floats:
    """Seconds to compute the part of the shared prefix that the worker does not have, per row."""
    hits = request.hit_tokens
    copied = np.maximum(request.best_hit - hits, 0.0)
    seconds: Floats = 0.5 * copied
    seconds += hits
    seconds *= workers.attended_s
    seconds += workers.prefill_token_s
    seconds *= copied
    return seconds
