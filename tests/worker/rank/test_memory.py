"""How the memory of one device is shared out, with the numbers that a CUDA device would tell."""

from __future__ import annotations

from worker.rank.memory import cache_share

GB = 1 << 30


def test_one_rank_takes_what_its_step_and_others_leave() -> None:
    # 80 in all; 10 held by this rank and 4 by others; 13 at the peak of a step.
    assert cache_share(80 * GB, 66 * GB, 0.75, [(13 * GB, 10 * GB)]) == (60 - 4 - 13) * GB


def test_ranks_on_one_device_share_its_memory() -> None:
    ranks = [(13 * GB, 10 * GB), (12 * GB, 9 * GB)]
    free = (80 - 10 - 9 - 5) * GB
    share = cache_share(80 * GB, free, 0.75, ranks)
    assert 2 * share == (60 - 5 - 13 - 12) * GB


def test_a_full_device_has_no_room() -> None:
    assert cache_share(80 * GB, 1 * GB, 0.9, [(13 * GB, 10 * GB)]) < 0
