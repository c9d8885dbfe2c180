"""The default policy: seconds, with recomputing dearer the longer the queues."""

from __future__ import annotations

import numpy as np

from router.config import RoutingConfig
from router.fleet.base import RequestView, RoutingPolicy
from router.fleet.congestion import Congestion
from router.fleet.popularity import PrefixPopularity
from router.fleet.utilisation import Utilisation
from router.fleet.workers import Floats, WorkerTable

# Arrays: numpy converts any other number with each use.
_ZERO, _HALF, _ONE = np.array(0.0), np.array(0.5), np.array(1.0)
_HOST_COPY = 0.1
"""Seconds to fetch a token's key-value pairs from host memory, in seconds to compute it."""


class AdaptivePolicy(RoutingPolicy):
    """cost = waiting + (1 + β + ρ)·work + co-scheduling + slowdown + eviction, in seconds.

    - waiting: what others take of the worker's time before the prompt is done, in the order in
      which its scheduler lets them: a short prompt does not wait for long ones under way, an
      urgent one not for less urgent ones;
    - work: to compute what is not in its cache, and to fetch what is in host memory only;
    - β: how many requests such work delays, up to a bound (see Congestion), on a fast worker more
      than on a slow one; at least β_min of it for a prefix that no cache has yet;
    - ρ: the worker's own utilisation. Those who come there for their prefixes during the work are
      delayed by it, whoever else is idle: λ·S = ρ of them. So what is new settles where least is
      asked for, and what is not moves the less, the busier the place it would go to;
    - co-scheduling: prompts that end in one step of a worker have their first tokens at its end, so
      what is put into it besides delays each of them;
    - slowdown: of the requests that generate there by one more, at a part of its cost;
    - eviction: what is thrown out of a full cache to make room, at a part of its cost.

    Work that other workers need not do because they hold the prefix buys a copy of it. A prefix
    that is in a part p of all requests in flight deserves a copy on that part of the workers; as
    long as it has fewer, its β is reduced by as much: a hot prefix is computed once more as soon as
    the queue in front of it takes as long.

    A prefix that is being computed for the first time is asked for by one burst, as far as anyone
    knows. Its siblings would have their first token no sooner from a worker that begins with it
    now, so there the second copy has to save (1 + β_min) times its time.

    A prefix that keeps coming back, in bursts or one by one, is worth more: as often as it came
    lately it is expected to come again, and each time it would wait that much less. This is what
    a further copy is worth, at most what it costs, as long as such prefixes have fewer copies than
    their part of all requests deserves.

    Args:
        config: bounds of β, and the part that evicted blocks cost.
        utilisation: of the fleet.
    """

    tolerance = 1e-3  # estimates are no better than that

    def __init__(self, config: RoutingConfig, utilisation: Utilisation) -> None:
        self._config = config
        self._utilisation = utilisation
        self._congestion = Congestion(utilisation)
        self._popularity = PrefixPopularity()

    def booked(self, work_s: float) -> None:
        """See RoutingPolicy."""
        self._congestion.placed(work_s)

    def costs(self, request: RequestView, workers: WorkerTable, now: float) -> Floats:
        """See RoutingPolicy."""
        config = self._config
        hits = request.hit_tokens
        uncached = request.num_tokens - hits
        waiting, slot_wait_s = workers.waiting_s(now), workers.slot_wait_s
        if request.queue is not None:
            waiting = request.queue.waiting_s(waiting)
            slot_wait_s = request.queue.slot_wait_s(workers)
        members = int(np.count_nonzero(request.eligible)) or 1
        # Not a dot product: BLAS would wake its threads for ten thousand workers.
        queue_s = np.add.reduce(waiting, where=request.eligible).item() / members
        beta = min(self._congestion.delayed(queue_s, now), config.adaptive_max_beta)
        cost = workers.compute_s(uncached, hits)
        delay = workers.delay_s(now, uncached, cost, waiting, request.coming_tokens)
        packing = cost - workers.step_s  # which is taken in any case
        np.minimum(packing, workers.step_headroom_s, out=packing)
        packing *= workers.num_coscheduled
        delay += packing
        if request.host_hit_tokens is not None:
            cost += request.host_hit_tokens * workers.prefill_token_s * _HOST_COPY
        weight = beta * workers.relative_speed
        weight += self._utilisation.of_workers(len(weight), now)
        weight += _ONE
        cost *= weight
        if beta < config.adaptive_min_beta and _is_new(request):
            short = config.adaptive_min_beta - beta
            cost += short * workers.relative_speed * _copy_s(request, workers)
        if request.sharers and beta > 0.0:
            discount = self._copy_discount(request, workers, beta)
            if discount is not None:
                cost -= discount
        if request.best_hit >= request.page_size:
            worth = self._copy_worth(request, waiting, members, now)
            if worth is not None:
                copy_s = _copy_s(request, workers)
                cost -= np.minimum(worth, weight * copy_s)
        cost += delay
        cost += slot_wait_s
        if config.adaptive_decode_weight:
            cost += config.adaptive_decode_weight * workers.slowdown_s
        if config.adaptive_eviction_weight:
            evicted = uncached - workers.empty_tokens
            np.maximum(evicted, _ZERO, out=evicted)
            np.minimum(evicted, uncached, out=evicted)
            evicted *= workers.prefill_token_s
            evicted *= config.adaptive_eviction_weight
            cost += evicted
        return cost

    def _copy_discount(
        self, request: RequestView, workers: WorkerTable, beta: float
    ) -> Floats | None:
        """What computing the shared prefix again is cheaper by, per worker."""
        enough = 0.5 * request.best_hit
        holders = np.count_nonzero(request.hit_tokens >= enough) if enough else 0
        members = np.count_nonzero(workers.eligible)
        deserved = members * request.sharers / request.num_in_flight
        if holders >= deserved:
            return None
        discount = _copy_s(request, workers)
        discount *= workers.relative_speed
        discount *= beta * (1.0 - holders / deserved)
        return discount

    def _copy_worth(
        self, request: RequestView, waiting: Floats, members: int, now: float
    ) -> Floats | None:
        """What later requests save where another worker has the shared prefix too, per worker."""
        block = int(request.best_hit) // request.page_size - 1
        times, share = self._popularity.take(request.hashes.item(block), now)
        if not times:
            return None
        holders = request.hit_tokens >= 0.5 * request.best_hit
        holders &= request.eligible
        num_holders = np.count_nonzero(holders)
        if not num_holders or num_holders + 0.5 > share * members:
            return None
        shorter = np.maximum(waiting[holders].min() - waiting, 0.0)
        worth: Floats = shorter * (times / (num_holders + 1))
        return worth


def _is_new(request: RequestView) -> bool:
    """Whether most of the prefix that it shares is in no cache, but about to be computed."""
    return request.coming_tokens is not None and 2.0 * request.best_cached < request.best_hit


def _copy_s(request: RequestView, workers: WorkerTable) -> Floats:
    """To compute that part of the shared prefix which a worker lacks, per worker."""
    hits = request.hit_tokens
    copied = request.best_hit - hits
    np.maximum(copied, _ZERO, out=copied)
    seconds = _HALF * copied
    seconds += hits
    seconds *= workers.attended_s
    seconds += workers.prefill_token_s
    seconds *= copied
    return seconds
