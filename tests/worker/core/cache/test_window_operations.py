"""Random leases with sliding windows, against a model in which free memory is erased."""

from __future__ import annotations

import random
from array import array
from collections import deque
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.effort import cases
from worker.core.cache.lease import Lease
from worker.core.cache.manager import CacheManager
from worker.plan.plan import PageCopies
from worker.protocol.page_groups import PageGroups

SIZE = 2
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)
STEP_TOKENS = 6
NONE = PageCopies([], [])

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
    stores: PageCopies
    loads: PageCopies


class WindowMachine(RuleBasedStateMachine):
    """Leases open with a match, compute some positions per step, some of which are rejected drafts,
    and commit and advance when steps complete."""

    groups = PageGroups(num_full=1, num_window=1, window=5)
    num_pages = 31
    num_host_pages = 0

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
            num_host_pages=self.num_host_pages,
        )
        self.running: list[Running] = []
        self.ended: list[list[int]] = []
        """Tokens of the last requests that `churn` ended."""
        self.memory: dict[Cell, Content | None] = {}
        self.host: dict[Cell, Content | None] = {}
        """Content of host slots."""
        self.num_loads = 0
        self.steps: deque[Step] = deque()
        self.seq = self.completed = 0

    @rule(tokens=TOKENS, salt=st.sampled_from(["", "", "x"]))
    def open(self, tokens: list[int], salt: str) -> None:
        row = array("i", tokens)
        match = self.cache.match(row, salt)
        assert match.num_pages * SIZE < len(tokens), "nothing left to compute"
        self._is_longest(row, salt, match.num_pages, with_host=True)
        alone = self.cache.match(row, salt, with_host=False)
        self._is_longest(row, salt, alone.num_pages, with_host=False)
        assert match.num_alone == (alone.num_pages if match.num_host else 0)
        if not self.cache.num_free_slots:
            return
        if self.cache.num_needed(len(row), match) > self.cache.num_available - match.num_unlocked:
            return
        before = self.cache.num_available
        lease = self.cache.open(match, salt)
        if not match.num_host:
            assert self.cache.num_available == before - match.num_unlocked
        self.running.append(Running(lease, row, salt, match.num_pages * SIZE))
        if match.num_host:
            # Its pages are loaded by the next Plan, which must have its row.
            self.num_loads += 1
            before = self.seq
            self._compute(self.running[-1], 1, 0)
            assert self.seq > before

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, STEP_TOKENS), wrong=st.integers(0, 3), more=TOKENS)
    def compute(self, data: st.DataObject, count: int, wrong: int, more: list[int]) -> None:
        one = data.draw(st.sampled_from(self.running))
        one.row.extend(more[: max(0, 40 - len(one.row))])
        self._compute(one, count, wrong)

    def _compute(self, one: Running, count: int, wrong: int) -> None:
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
        stores, loads, later = (copies or NONE for copies in self.cache.take_copies(self.seq))
        stores = PageCopies(stores.pages + later.pages, stores.slots + later.slots)
        self.steps.append(Step(one, right, reads, writes, stores, loads))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self._release(data.draw(st.sampled_from(self.running)))

    def _release(self, one: Running) -> None:
        self.running.remove(one)
        self.cache.release(one.lease)

    @precondition(lambda self: self.completed < self.seq)
    @rule()
    def complete(self) -> None:
        self.completed += 1
        step = self.steps.popleft()
        _copy(step.stores.pages, self.memory, step.stores.slots, self.host)
        _copy(step.loads.slots, self.host, step.loads.pages, self.memory)
        for cell, expected in step.reads.items():
            assert self.memory[cell] == expected, "a page was overwritten under a step in flight"
        self.memory |= step.writes
        self.cache.complete(self.completed)
        one = step.running
        if one in self.running:
            self.cache.commit(one.lease, one.row, step.end)
            self.cache.advance(one.lease, step.end)
            border = step.end - step.end % SIZE  # where the next turn of a conversation starts
            seen = max(0, border + 1 - self.groups.window) // SIZE
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
        if self.cache.host is not None:
            # What is evicted without need is free, but waits to be stored.
            for stores in (self.cache.host._stores, *(step.stores for step in self.steps)):
                free.difference_update(stores.pages)
            slots = set(self.cache.host._slots.free)
            self.host = {cell: value for cell, value in self.host.items() if cell[0] not in slots}
        self.memory = {cell: value for cell, value in self.memory.items() if cell[0] not in free}

    def teardown(self) -> None:
        for one in self.running:
            self.cache.release(one.lease)
        self.running = []
        while self.completed < self.seq:
            self.complete()
        self.seq += 1  # with loads of leases that were released before a step
        self.cache.take_copies(self.seq)
        self.cache.complete(self.seq)
        self.cache.check_invariants([])
        assert self.cache.num_available == self.num_pages - 1
        assert not self.cache.is_fenced
        # All cached pages can be reclaimed.
        count = self.cache.num_allocatable
        lease = self.cache.open(self.cache.match(array("i", [9]), "y"), "y", shared=False)
        assert len(self.cache.allocate(lease, count)) == count
        self.cache.release(lease)
        self.cache.check_invariants([])

    def churn(self, rng: random.Random) -> None:
        """One random operation; many of them make pages scarce."""
        kind = rng.randrange(10)
        more = rng.choices((0, 1), k=rng.randint(1, 14))
        if kind < 2:
            # Often the next turn of a conversation that has ended.
            past = rng.choice(self.ended) if self.ended and rng.random() < 0.7 else []
            self.open([*past, *more][:39], "" if past else rng.choice(("", "x")))
        elif kind < 5 and self.completed < self.seq:
            self.complete()
        elif kind < 9 and self.running:
            one = rng.choice(self.running)
            one.row.extend(more[: max(0, 40 - len(one.row))])
            self._compute(one, rng.randint(1, STEP_TOKENS), rng.randint(0, 3))
        elif self.running:
            one = rng.choice(self.running)
            self.ended = [*self.ended[-5:], [*one.row]]
            self._release(one)
        self.every_page_is_somewhere_once()
        self.what_is_free_is_forgotten()

    def _is_longest(self, row: array[int], salt: str, found: int, *, with_host: bool) -> None:
        """The longest common hit: full groups have all pages, window groups the last tokens."""
        blocks, host = self.cache._blocks, self.cache._host_blocks
        assert blocks is not None
        match = self.cache._tree.match(row.tobytes(), (len(row) - 1) // SIZE, salt)
        seen = [block in blocks._window for block in match.pages]
        if with_host and match.host_node is not None:
            assert host is not None
            in_host = self.cache._tree.last_pages(match.host_node, match.num_host)
            seen += [host.has_window(block) for block in in_host]
        hits = [
            count
            for count in range(len(seen) + 1)
            if all(
                seen[place // SIZE]
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


def _copy(
    sources: list[int],
    source: dict[Cell, Content | None],
    targets: list[int],
    target: dict[Cell, Content | None],
) -> None:
    for before, after in zip(sources, targets, strict=True):
        for at in range(SIZE):
            target.pop((after, at), None)
            if (before, at) in source:
                target[after, at] = source[before, at]


class ManyGroupsMachine(WindowMachine):
    groups = PageGroups(num_full=2, num_window=3, window=4)
    num_pages = 71


class OnlyWindowsMachine(WindowMachine):
    groups = PageGroups(num_full=0, num_window=1, window=3)
    num_pages = 17


class NarrowestMachine(WindowMachine):
    groups = PageGroups(num_full=1, num_window=1, window=1)


class HostMachine(WindowMachine):
    num_pages = 27
    num_host_pages = 60


class SmallHostMachine(ManyGroupsMachine):
    num_pages = 61
    num_host_pages = 70


class OnlyWindowsHostMachine(OnlyWindowsMachine):
    num_host_pages = 30


@pytest.mark.parametrize("machine_class", [HostMachine, SmallHostMachine, OnlyWindowsHostMachine])
def test_blocks_move_between_tiers(machine_class: type[WindowMachine]) -> None:
    machine, rng = machine_class(), random.Random(3)
    for _ in range(1000):
        machine.churn(rng)
    host = machine.cache.host
    assert host is not None
    assert machine.num_loads > 4
    totals = host.totals
    assert min(totals.num_loaded, totals.num_evicted, totals.num_recomputed) > 4
    machine.teardown()


SETTINGS = settings(max_examples=cases(60), stateful_step_count=50, deadline=None, derandomize=True)
TestWindowMachine = WindowMachine.TestCase
TestManyGroupsMachine = ManyGroupsMachine.TestCase
TestOnlyWindowsMachine = OnlyWindowsMachine.TestCase
TestNarrowestMachine = NarrowestMachine.TestCase
TestWindowMachine.settings = TestManyGroupsMachine.settings = SETTINGS
TestOnlyWindowsMachine.settings = TestNarrowestMachine.settings = SETTINGS
TestHostMachine = HostMachine.TestCase
TestSmallHostMachine = SmallHostMachine.TestCase
TestOnlyWindowsHostMachine = OnlyWindowsHostMachine.TestCase
TestHostMachine.settings = TestSmallHostMachine.settings = SETTINGS
TestOnlyWindowsHostMachine.settings = SETTINGS
