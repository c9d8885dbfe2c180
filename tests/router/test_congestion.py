"""The number of requests delayed by a second of work."""

from __future__ import annotations

import numpy as np
import pytest

from router.fleet.congestion import Congestion


@pytest.mark.parametrize(("busy", "delayed"), [(0.0, 0.0), (0.5, 1.0), (0.8, 4.0)])
def test_without_a_queue_it_is_the_utilisation_over_what_is_idle(
    busy: float, delayed: float
) -> None:
    assert Congestion().anywhere(busy, 1, 0.0) == pytest.approx(delayed)


def test_without_a_queue_work_delays_few_where_others_are_likely_to_be_idle() -> None:
    quiet = [Congestion().anywhere(0.5, number, 0.0) for number in (1, 2, 8, 64)]
    assert quiet == sorted(quiet, reverse=True)
    assert quiet[2] < 0.3 * quiet[0]
    full = [Congestion().anywhere(1.0, number, 0.0) for number in (1, 8)]
    assert full[1] > 0.9 * full[0]


def test_it_grows_with_the_queue_in_requests() -> None:
    congestion = Congestion()
    for second in range(20):
        congestion.placed(0.5, float(second))
    without, queued = (congestion.anywhere(0.9, 1, queue_s) for queue_s in (0.0, 2.0))
    assert queued / without == pytest.approx(1.0 + 2.0 / 0.5)
    bound = congestion.at_workers(np.array([0.0, 0.5, 0.5]), np.array([2.0, 0.0, 2.0]))
    assert bound == pytest.approx([0.0, 0.5, 0.5 * (1.0 + 2.0 / 0.5)])


def test_the_work_of_a_request_is_that_of_late() -> None:
    congestion = Congestion()
    for tenth in range(2000):
        congestion.placed(1.0 if tenth < 1000 else 0.1, 0.1 * tenth)
    assert congestion.anywhere(0.5, 1, 1.0) == pytest.approx(1.0 + 1.0 / 0.1, rel=0.01)


def test_it_is_finite_however_busy() -> None:
    assert 40.0 < Congestion().anywhere(1.0, 8, 0.0) < 60.0
