"""The router with sglang-router's algorithm: longest prefix first, then fewest open requests."""

from __future__ import annotations

import numpy as np

from deploy.benchmarks.routing.cache_aware import CacheAwareRouter
from deploy.benchmarks.routing.worker import SimWorker
from deploy.benchmarks.routing.workload import Arrival, FleetShape

PAGE = FleetShape().page_size


def make_router(**settings: float) -> CacheAwareRouter:
    router = CacheAwareRouter(settings)
    for number in range(3):
        router.joined(SimWorker(f"w{number}", FleetShape()))
    return router


def place(router: CacheAwareRouter, name: str, num_shared: int, num_own: int) -> str:
    """Places a prompt with pages of a shared prefix and own ones; returns its worker."""
    shared = np.ones(num_shared * PAGE, "<i4")
    own = np.random.default_rng(len(name)).integers(2, 99, num_own * PAGE, dtype="<i4")
    tokens = np.concatenate([shared, own]).tobytes()
    (placement,) = router.place([Arrival(request_id=name, at=0.0, tokens=tokens, output_len=1)])
    assert placement is not None
    return placement.worker_id


def test_prompts_follow_their_longest_prefix_whatever_the_load() -> None:
    router = make_router()
    first = place(router, "a", 10, 0)
    assert {place(router, "b" * n, 10, 20) for n in range(2, 9)} == {first}, "a third is shared"
    assert place(router, "c" * 10, 10, 30) != first, "a quarter is shared"


def test_prompts_avoid_a_worker_with_many_more_open_requests() -> None:
    router = make_router(balance_abs_threshold=4)
    first = place(router, "a", 10, 0)
    placed = [place(router, "b" * n, 10, 2) for n in range(2, 8)]
    assert placed[:4] == [first] * 4
    assert placed[4] != first, "5 open requests more than other workers"
    for n in range(2, 8):
        router.ended(placed[n - 2], "b" * n)
    assert place(router, "d", 10, 0) == first


def test_a_worker_that_has_left_is_not_chosen() -> None:
    router = make_router()
    worker = SimWorker(place(router, "a", 10, 0), FleetShape())
    router.lost(worker)
    assert place(router, "b", 10, 0) == worker.worker_id, "only its stream was broken"
    worker.up = False
    router.lost(worker)
    assert place(router, "c", 10, 0) != worker.worker_id
