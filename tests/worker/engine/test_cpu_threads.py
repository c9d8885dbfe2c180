"""How many compute threads a rank takes."""

from __future__ import annotations

from worker.engine.cpu import default_threads

DEMO, LARGE = 4_700_000, 85_000_000


def test_a_small_model_leaves_a_core_to_the_scheduler() -> None:
    assert default_threads(DEMO, 1, 2) == 1
    assert default_threads(DEMO, 1, 8) == 7
    assert default_threads(DEMO, 2, 8) == 3


def test_a_large_model_takes_all_cores() -> None:
    assert default_threads(LARGE, 1, 2) == 2
    assert default_threads(LARGE, 2, 8) == 4


def test_every_rank_has_a_thread() -> None:
    assert default_threads(DEMO, 4, 2) == 1
    assert default_threads(LARGE, 4, 2) == 1
