"""What one cache as large as all workers' together would have hit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from cluster.bench.routing.simulation import Outcome
from cluster.bench.routing.worker import SALT
from router.fleet.memo import HashMemo
from worker.wire.blocks import root_hash


def pooled_hit_rate(outcomes: Sequence[Outcome], page_size: int, num_pages: int) -> float:
    """Share of the measured prompts' tokens in one pooled cache with least-recently-used eviction.

    Requests come in the order of `outcomes`; each finds what all before it have computed. A mark
    to compare with rather than a strict bound: another order of eviction may hit more.
    """
    cache: OrderedDict[int, None] = OrderedDict()
    memo = HashMemo()
    root = root_hash(SALT)
    hit = total = 0
    for outcome in outcomes:
        arrival = outcome.arrival
        hashes = memo.hashes(arrival.tokens, page_size, root).tolist()
        found = next((n for n, value in enumerate(hashes) if value not in cache), len(hashes))
        if arrival.measured:
            hit += min(found * page_size, arrival.num_tokens - 1)
            total += arrival.num_tokens
        for value in reversed(hashes):  # so that leaves are evicted before what they follow
            cache[value] = None
            cache.move_to_end(value)
        while len(cache) > num_pages:
            cache.popitem(last=False)
    return hit / total if total else 0.0
