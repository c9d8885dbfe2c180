"""Utilisation of each worker."""

from __future__ import annotations

from itertools import pairwise

import pytest

from router.fleet.pace import FleetPace
from router.fleet.utilisation import Utilisation
from worker.protocol.messages import PrefillSteps, StepShape


def _busy(parts: list[float], seconds: int) -> Utilisation:
    utilisation = Utilisation()
    for row in range(len(parts)):
        utilisation.begin(row, 0.0)
    for second in range(1, seconds + 1):
        for row, part in enumerate(parts):
            utilisation.add(row, part, float(second))
    return utilisation


@pytest.mark.parametrize("seconds", [60, 600])
def test_each_worker_has_its_own(seconds: int) -> None:
    parts = _busy([0.2, 0.0, 0.8], seconds).of_workers(5, float(seconds))
    assert parts == pytest.approx([0.2, 0.0, 0.8, 0.0, 0.0], rel=0.1, abs=1e-3)


def test_it_is_forgotten_with_time_and_with_the_worker() -> None:
    utilisation = _busy([0.5, 0.5], 60)
    full = utilisation.of_workers(2, 60.0)
    utilisation.begin(0, 60.0)
    assert utilisation.of_workers(2, 60.0).tolist() == [0.5, full[1]]
    later = utilisation.of_workers(2, 70.0)
    assert later[1] == pytest.approx(full[1] / 2.718, rel=0.05)
    assert utilisation.of_workers(2, 1e6).max() < 1e-9
    for second in range(60):
        utilisation.add(1, 0.5, 1e6 + second)
    assert utilisation.of_workers(2, 1e6 + 60) == pytest.approx([0.0, 0.5], rel=0.1, abs=1e-3)


def test_what_is_not_known_is_in_the_middle_and_soon_known() -> None:
    utilisation = Utilisation()
    utilisation.begin(0, 0.0)
    assert utilisation.of_workers(1, 0.0).tolist() == [0.5]
    idle = [utilisation.of_workers(1, float(second)).item() for second in (1, 2, 5)]
    assert idle == sorted(idle, reverse=True)
    assert idle[0] == pytest.approx(0.25, rel=0.1)
    assert idle[2] < 0.1
    utilisation.add(0, 0.9, 1.0)
    assert 0.5 < utilisation.of_workers(1, 1.0).item() < 0.8


def test_a_report_of_several_steps_counts_as_their_reports_one_by_one() -> None:
    pace = FleetPace()
    shapes = [StepShape(n, 100 * n, 5000 * n, n, 500 * n, n, 2 * n, 1) for n in range(1, 9)]
    all_ms = [1e3 * pace.costs.step(shape) for shape in shapes]
    totals = [PrefillSteps()]
    for shape, step_ms in zip(shapes, all_ms, strict=True):
        totals.append(totals[-1].with_step(shape, step_ms))
    one_by_one = [pace.busy_s(0, a, b) for a, b in pairwise(totals)]
    for shape, busy_s in zip(shapes, one_by_one, strict=True):
        expected = pace.costs.prefill_token * shape.prefill_tokens
        assert busy_s == pytest.approx(expected + pace.costs.attended * shape.prefill_attended)
    assert pace.busy_s(0, totals[0], totals[-1]) == pytest.approx(sum(one_by_one))
    assert pace.busy_s(0, totals[3], totals[3]) == 0.0
