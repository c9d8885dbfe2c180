"""How many requests a second of work delays."""

from __future__ import annotations

from math import exp

import pytest

from router.fleet.congestion import Congestion
from router.fleet.utilisation import Utilisation


class Rig:
    """Workers that are busy a given part of their time, up to second 300."""

    def __init__(self, busy: float, num_workers: int = 1) -> None:
        utilisation = Utilisation(10.0)
        utilisation.set_num_workers(num_workers, 0.0)
        for tenth in range(1, 3001):
            for row in range(num_workers):
                utilisation.add(row, 0.1 * busy, 0.1 * tenth)
        self.congestion = Congestion(utilisation)


@pytest.mark.parametrize(("busy", "delayed"), [(0.0, 0.0), (0.5, 1.0), (0.8, 4.0)])
def test_without_a_queue_it_is_the_utilisation_over_what_is_idle(
    busy: float, delayed: float
) -> None:
    assert Rig(busy).congestion.delayed(0.0, 300.0) == pytest.approx(delayed, rel=0.25)


def test_without_a_queue_work_delays_few_where_others_are_likely_to_be_idle() -> None:
    quiet = [Rig(0.5, number).congestion.delayed(0.0, 300.0) for number in (1, 2, 8, 64)]
    assert quiet == sorted(quiet, reverse=True)
    assert quiet[2] < 0.3 * quiet[0]
    full = [Rig(1.0, number).congestion.delayed(0.0, 300.0) for number in (1, 8)]
    assert full[1] > 0.9 * full[0]


def test_it_grows_with_the_queue_in_requests() -> None:
    delayed = []
    for queue_s in (0.0, 2.0):
        congestion = Rig(0.9).congestion
        congestion.placed(0.5)
        congestion.delayed(0.0, 300.0)
        times = [congestion.delayed(queue_s, 300.0 + place / 1000.0) for place in range(1, 1001)]
        delayed.append(times[-1])
    seen = 2.0 * (1.0 - exp(-1.0 / 3.0))  # of the queue, after a second
    assert delayed[1] / delayed[0] == pytest.approx(1.0 + seen / 0.5, rel=0.01)


def test_a_burst_is_no_queue_to_itself() -> None:
    rig = Rig(0.5)
    rig.congestion.placed(0.1)
    first = rig.congestion.delayed(0.0, 301.0)
    assert [rig.congestion.delayed(float(n), 301.0) for n in range(1, 9)] == [first] * 8


def test_it_is_finite_however_busy() -> None:
    assert 40.0 < Rig(1.0).congestion.delayed(0.0, 300.0) < 60.0
