"""How busy workers are, each by itself and all together."""

from __future__ import annotations

import pytest

from router.fleet.utilisation import Utilisation


def _busy(parts: list[float], seconds: int) -> Utilisation:
    utilisation = Utilisation(10.0)
    utilisation.set_num_workers(len(parts), 0.0)
    for second in range(1, seconds + 1):
        for row, part in enumerate(parts):
            utilisation.add(row, part, float(second))
    return utilisation


@pytest.mark.parametrize("seconds", [60, 600])
def test_each_worker_has_its_own(seconds: int) -> None:
    utilisation = _busy([0.2, 0.0, 0.8], seconds)
    assert utilisation.at(seconds) == pytest.approx(1.0 / 3.0, rel=0.1)
    shares = utilisation.of_workers(5, seconds)
    assert shares == pytest.approx([0.2, 0.0, 0.8, 0.0, 0.0], rel=0.1)
    assert shares.mean() * 5 / 3 == pytest.approx(utilisation.at(seconds))


def test_it_is_forgotten_with_time_and_with_the_worker() -> None:
    utilisation = _busy([0.5, 0.5], 60)
    full = utilisation.of_workers(2, 60.0)
    utilisation.forget(0)
    assert utilisation.of_workers(2, 60.0).tolist() == [0.0, full[1]]
    later = utilisation.of_workers(2, 70.0)
    assert later[1] == pytest.approx(full[1] / 2.718, rel=0.05)
    assert utilisation.of_workers(2, 1e6).max() < 1e-9
    for second in range(60):
        utilisation.add(1, 0.5, 1e6 + second)
    assert utilisation.of_workers(2, 1e6 + 60) == pytest.approx([0.0, 0.5], rel=0.1)


def test_the_first_step_makes_no_busy_worker() -> None:
    utilisation = Utilisation(10.0)
    utilisation.set_num_workers(1, 0.0)
    utilisation.add(0, 0.5, 0.5)
    assert utilisation.of_workers(1, 0.5) == pytest.approx([0.2], rel=0.1)
