from __future__ import annotations

import pytest

from worker.core.cache.fence import CompletedSteps
from worker.core.cache.pool import FencedPool


def test_a_released_id_waits_for_its_fence() -> None:
    steps = CompletedSteps()
    pool = FencedPool(1, 3, steps)
    taken = pool.take(3)
    assert taken == [1, 2, 3]
    steps.complete(4)
    pool.release(taken[:1], fence=4)
    pool.release(taken[1:], fence=6)
    assert (pool.num_free, pool.num_fenced) == (1, 2)
    steps.complete(5)
    assert pool.num_free == 1
    pool.check_invariants([])
    steps.complete(6)
    assert (pool.num_free, pool.num_fenced) == (3, 0)
    pool.check_invariants([])


def test_the_check_finds_lost_and_doubly_owned_ids() -> None:
    pool = FencedPool(0, 4, CompletedSteps())
    taken = pool.take(2)
    pool.check_invariants(taken)
    with pytest.raises(AssertionError, match="3 ids"):
        pool.check_invariants(taken[:1])
    pool.release(taken[:1], fence=0)
    pool.release(taken[:1], fence=0)
    with pytest.raises(AssertionError, match="two owners"):
        pool.check_invariants([])


def test_taking_more_than_is_free_is_an_error() -> None:
    with pytest.raises(AssertionError, match="3 requested, 2 free"):
        FencedPool(0, 2, CompletedSteps()).take(3)


def test_steps_complete_in_order() -> None:
    steps = CompletedSteps()
    steps.complete(2)
    with pytest.raises(AssertionError, match="after step 2"):
        steps.complete(2)
