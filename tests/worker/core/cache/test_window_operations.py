"""Random leases with sliding windows, against a model in which free memory is erased."""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.effort import cases
from worker.core.cache.lease import Lease
from worker.core.cache.manager import CacheManager
from worker.protocol.page_groups import PageGroups

SIZE = 2
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)
STEP_TOKENS = 6

Cell = tuple[int, int]
"""Page and offset."""
Content = tuple[str, tuple[int, ...]]
"""Salt and all tokens up to a position."""


@dataclass
class Running:
    lease: Lease
    row: array[int]
    salt: str
    computed: int
    """Positions, by steps launched."""


@dataclass
class Step:
    running: Running
    end: int
    reads: dict[Cell, Content]
    writes: dict[Cell, Content | None]


class WindowMachine(RuleBasedStateMachine):
    """Leases open with a match, compute some positions per step, some of which are rejected drafts,
    and commit and advance when steps complete."""

    groups = PageGroups(num_full=1, num_window=1, window=5)
    num_pages = 31

    def __init__(self) -> None:
        super().__init__()
        self.cache = CacheManager(
            num_pages=self.num_pages,
            page_size=SIZE,
            num_slots=4,
            block_hash_salt="m",
            enable_prefix_caching=True,
            groups=self.groups,
            step_tokens=STEP_TOKENS,
        )
        self.running: list[Running] = []
        self.memory: dict[Cell, Content | None] = {}
        self.steps: deque[Step] = deque()
        self.seq = self.completed = 0

    @rule(tokens=TOKENS, salt=st.sampled_from(["", "", "x"]))
    def open(self, tokens: list[int], salt: str) -> None:
        row = array("i", tokens)
        match = self.cache.match(row, salt)
        assert match.num_pages * SIZE < len(tokens), "nothing left to compute"
        self._is_longest(row, salt, match.num_pages)
        if not self.cache.num_free_slots:
            return
        if self.cache.num_needed(len(row), match) > self.cache.num_available - match.num_unlocked:
            return
        before = self.cache.num_available
        lease = self.cache.open(match, salt)
        assert self.cache.num_available == before - match.num_unlocked
        self.running.append(Running(lease, row, salt, match.num_pages * SIZE))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, STEP_TOKENS), wrong=st.integers(0, 3), more=TOKENS)
    def compute(self, data: st.DataObject, count: int, wrong: int, more: list[int]) -> None:
        one = data.draw(st.sampled_from(self.running))
        one.row.extend(more[: max(0, 40 - len(one.row))])
        start, end = one.computed, min(one.computed + count, len(one.row))
        missing = -(-end // SIZE) - len(one.lease.pages)
        if missing > 0:
            if missing > self.cache.num_allocatable:
                return
            self.cache.allocate(one.lease, missing)
        if start == end:
            return
        self.seq += 1
        one.lease.fence = self.seq
        right = max(start + 1, end - wrong)
        tables = [self._table(one, group) for group in range(self.groups.num_groups)]
        reads: dict[Cell, Content] = {}
        writes: dict[Cell, Content | None] = {}
        for group, table in enumerate(tables):
            seen = 0 if group < self.groups.num_full else max(0, start + 1 - self.groups.window)
            reads |= {_cell(table, at): _content(one, at) for at in range(seen, start)}
            for at in range(start, end):
                writes[_cell(table, at)] = _content(one, at) if at < right else None
        one.computed = right
        self.steps.append(Step(one, right, reads, writes))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.running))
        self.running.remove(one)
        self.cache.release(one.lease)

    @precondition(lambda self: self.completed < self.seq)
    @rule()
    def complete(self) -> None:
        self.completed += 1
        step = self.steps.popleft()
        for cell, expected in step.reads.items():
            assert self.memory[cell] == expected, "a page was overwritten under a step in flight"
        self.memory |= step.writes
        self.cache.complete(self.completed)
        one = step.running
        if one in self.running:
            self.cache.commit(one.lease, one.row, step.end)
            self.cache.advance(one.lease, step.end)
            seen = max(0, step.end + 1 - self.groups.window) // SIZE
            assert one.lease.first_seen == min(seen, len(one.lease.pages))

    @rule(count=st.integers(1, 12), ends=st.booleans())
    def pages_run_short(self, count: int, ends: bool) -> None:
        blocks = self.cache._blocks
        assert blocks is not None
        blocks.reclaim(self.cache._pages.num_free + count, ends=ends)
        if ends:
            blocks.evict(self.cache._tree.evict(count // 4))

    @invariant()
    def every_page_is_somewhere_once(self) -> None:
        self.cache.check_invariants(one.lease for one in self.running)

    @invariant()
    def what_is_free_is_forgotten(self) -> None:
        free = set(self.cache._pages.free)
        self.memory = {cell: value for cell, value in self.memory.items() if cell[0] not in free}

    def teardown(self) -> None:
        for one in self.running:
            self.cache.release(one.lease)
        self.running = []
        while self.completed < self.seq:
            self.complete()
        self.cache.check_invariants([])
        assert self.cache.num_available == self.num_pages - 1
        assert not self.cache.is_fenced
        # All cached pages can be reclaimed.
        count = self.cache.num_allocatable
        lease = self.cache.open(self.cache.match(array("i", [9]), "y"), "y", shared=False)
        assert len(self.cache.allocate(lease, count)) == count
        self.cache.release(lease)
        self.cache.check_invariants([])

    def _is_longest(self, row: array[int], salt: str, found: int) -> None:
        """The longest common hit: full groups have all pages, window groups the last tokens."""
        blocks = self.cache._blocks
        assert blocks is not None
        whole = self.cache._tree.match(row.tobytes(), (len(row) - 1) // SIZE, salt).pages
        hits = [
            count
            for count in range(len(whole) + 1)
            if all(
                whole[place // SIZE] in blocks._window
                for place in range(max(0, count * SIZE + 1 - self.groups.window), count * SIZE)
            )
        ]
        assert found == max(hits)

    def _table(self, one: Running, group: int) -> list[int]:
        start, pages = self.cache.page_rows(one.lease)[group]
        return [0] * start + pages


def _cell(table: list[int], position: int) -> Cell:
    assert table[position // SIZE], "a page that is given back is read"
    return table[position // SIZE], position % SIZE


def _content(one: Running, position: int) -> Content:
    return one.salt, tuple(one.row[: position + 1])


class ManyGroupsMachine(WindowMachine):
    groups = PageGroups(num_full=2, num_window=3, window=4)
    num_pages = 71


class OnlyWindowsMachine(WindowMachine):
    groups = PageGroups(num_full=0, num_window=1, window=3)
    num_pages = 17


class NarrowestMachine(WindowMachine):
    groups = PageGroups(num_full=1, num_window=1, window=1)


SETTINGS = settings(max_examples=cases(60), stateful_step_count=50, deadline=None, derandomize=True)
TestWindowMachine = WindowMachine.TestCase
TestManyGroupsMachine = ManyGroupsMachine.TestCase
TestOnlyWindowsMachine = OnlyWindowsMachine.TestCase
TestNarrowestMachine = NarrowestMachine.TestCase
TestWindowMachine.settings = TestManyGroupsMachine.settings = SETTINGS
TestOnlyWindowsMachine.settings = TestNarrowestMachine.settings = SETTINGS
