"""Loads from host memory: in pieces beside steps, and finished when a Plan requires it."""

from __future__ import annotations

import pytest
import torch

from worker.plan.plan import PageCopies, Plan
from worker.rank import host_pages
from worker.rank.host_pages import CPUHostPages

NUM_PAGES = 8


class FakeTime:
    """Clock that advances by 1 s per reading."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 1.0
        return self.now

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> CPUHostPages:
    """Two planes of eight pages: page n is full of n, slots of 0."""
    plane = torch.arange(NUM_PAGES, dtype=torch.float32)
    planes = [plane[:, None, None].repeat(1, 2, 3).clone() for _ in range(2)]
    monkeypatch.setattr(host_pages, "_PIECE_BYTES", 1)
    monkeypatch.setattr(host_pages, "time", FakeTime())
    return CPUHostPages(NUM_PAGES, planes)


def content(pages: CPUHostPages) -> list[list[float]]:
    """Values of the pages of each plane; each page must be one value."""
    found = []
    for plane, _ in pages._planes:
        assert bool((plane == plane[:, :1]).all())
        found.append(plane[:, 0].tolist())
    assert found[0] == found[1]
    return found


def test_stores_precede_rows_and_loads_take_several_plans(pages: CPUHostPages) -> None:
    moved, slots = [1, 2, 3, 4], [7, 6, 5, 4]
    pages.copy(Plan(1, [], [], [], stores=PageCopies(moved, slots)))
    assert pages.slots[4:, 0].tolist() == [4.0, 3.0, 2.0, 1.0]
    assert pages.take_ended(1) == (0.0, 0)
    to = [5, 6, 7, 1]
    pages.copy(Plan(2, [], [], [], loads=PageCopies(to, slots)))
    assert content(pages)[0][1] == 1.0, "the last page is not loaded at once"
    _, loading = pages.take_ended(2)
    assert loading == 2
    seq, total_ms = 2, 0.0
    while loading:
        seq += 1
        pages.copy(Plan(seq, [], [], []))
        ms, loading = pages.take_ended(seq)
        total_ms += ms
        assert seq < 20
    assert seq > 3
    assert total_ms > 0.0
    assert [content(pages)[0][page] for page in to] == [1.0, 2.0, 3.0, 4.0]
    assert pages.take_ended(seq) == (0.0, 0)


def test_a_plan_waits_for_the_loads_that_its_rows_read(pages: CPUHostPages) -> None:
    pages.copy(Plan(1, [], [], [], stores=PageCopies([1, 2, 3, 4], [1, 2, 3, 4])))
    first = PageCopies([5, 6], [1, 2])
    # Page 7 is stored before it is overwritten, and its slot is loaded at once.
    second = Plan(3, [], [], [], loads=PageCopies([7, 1], [3, 0]), load_stores=PageCopies([7], [0]))
    pages.copy(Plan(2, [], [], [], loads=first))
    pages.copy(second)
    pages.copy(Plan(4, [], [], [], loaded=2))
    assert content(pages)[0][5:7] == [1.0, 2.0]
    pages.copy(Plan(5, [], [], [], loads=PageCopies([2], [4]), loaded=5))
    assert content(pages)[0] == [0.0, 7.0, 4.0, 3.0, 4.0, 1.0, 2.0, 3.0]
    _, loading = pages.take_ended(5)
    assert loading == 0


def test_a_slot_is_stored_to_after_the_loads_that_the_plan_waits_for(pages: CPUHostPages) -> None:
    pages.copy(Plan(1, [], [], [], stores=PageCopies([1, 2, 3, 4], [1, 2, 3, 4])))
    pages.copy(Plan(2, [], [], [], loads=PageCopies([5, 6, 7], [1, 2, 3])))
    pages.copy(Plan(3, [], [], [], stores=PageCopies([0], [3]), loaded=2))
    assert content(pages)[0][5:] == [1.0, 2.0, 3.0]
    assert pages.slots[3, 0] == 0.0
