"""Random leases of requests with states, against a model in which free states are erased."""

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
from worker.core.cache.fence import CompletedSteps
from worker.core.cache.host_snapshots import Place
from worker.core.cache.lease import Lease
from worker.core.cache.manager import CacheManager
from worker.core.cache.snapshots import PendingSnapshot, SnapshotPool
from worker.plan.plan import PageCopies, StateLoad
from worker.protocol.page_groups import MIN_SNAPSHOTS, PageGroups

SIZE = 2
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)

Content = tuple[str, tuple[int, ...]]
"""Salt and all tokens that are part of a state."""


@dataclass
class Running:
    lease: Lease
    row: array[int]
    salt: str
    computed: int
    """Positions, by steps launched."""
    state: Content | None = None
    """Content of the slot, by steps completed."""
    unverified: int = 0
    """Drafts of steps in flight."""
    newest: int = 0
    """Position of the newest token, by steps completed; after a draft row, else unused."""
    reached: int = 0
    """Position of the slot's state, by steps completed."""


@dataclass
class Step:
    running: Running
    start: int
    end: int
    loads: list[StateLoad]
    stores: list[PendingSnapshot]
    to_host: PageCopies
    from_host: PageCopies
    drafts: int | None = None
    """Number of drafts of a draft row; None for other rows."""


class StateMachine(RuleBasedStateMachine):
    """Leases open with a match and compute some positions per step; two may be in flight."""

    snapshot_pages = 3
    num_pages = 31
    num_host_pages = 0

    def __init__(self) -> None:
        super().__init__()
        groups = PageGroups(snapshot_pages=self.snapshot_pages)
        self.cache = CacheManager(
            num_pages=self.num_pages,
            page_size=SIZE,
            num_slots=4,
            block_hash_salt="m",
            enable_prefix_caching=True,
            groups=groups,
            num_host_pages=self.num_host_pages,
        )
        self.num_snapshots = groups.num_snapshots(self.num_pages - 1)
        self.running: list[Running] = []
        self.ended: list[list[int]] = []
        """Tokens of the last requests that `churn` ended."""
        self.snapshots: dict[int, Content] = {}
        self.host_snapshots: dict[int, Content] = {}
        self.num_loads = 0
        self.slots: dict[int, Content] = {}
        self.steps: deque[Step] = deque()
        self.seq = self.completed = 0

    @rule(tokens=TOKENS, salt=st.sampled_from(["", "", "x"]))
    def open(self, tokens: list[int], salt: str) -> None:
        row = array("i", tokens)
        match = self.cache.match(row, salt)
        assert match.num_pages * SIZE < len(tokens), "nothing left to compute"
        assert match.num_pages == self._longest(row, salt, with_host=True)
        alone = self.cache.match(row, salt, with_host=False)
        assert alone.num_pages == self._longest(row, salt, with_host=False)
        assert match.num_alone == (alone.num_pages if match.num_host else 0)
        if not self.cache.num_free_slots:
            return
        if self.cache.num_needed(len(row), match) > self.cache.num_available - match.num_unlocked:
            return
        lease = self.cache.open(match, salt)
        start = match.num_pages * SIZE
        self.running.append(Running(lease, row, salt, start, reached=start))
        if match.num_host:
            # Its pages are loaded by the next Plan, which must have its row.
            before = self.seq
            self._compute(self.running[-1], 1)
            assert self.seq > before

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, 7), more=TOKENS)
    def compute(self, data: st.DataObject, count: int, more: list[int]) -> None:
        one = data.draw(st.sampled_from(self.running))
        one.row.extend(more[: max(0, 40 - len(one.row))])
        self._compute(one, count)

    def _compute(self, one: Running, count: int) -> None:
        start, end = one.computed, min(one.computed + count, len(one.row))
        missing = -(-end // SIZE) - len(one.lease.pages)
        if missing > self.cache.num_allocatable or start == end:
            return
        if missing > 0:
            self.cache.allocate(one.lease, missing)
        self.seq += 1
        one.lease.fence = self.seq
        one.computed = end
        loads = self.cache.take_loads(self.seq)
        stores = self.cache.take_snapshots(one.lease, start, end)
        assert all(one.reached < store.position <= end for store in stores)
        if not one.unverified and one.newest == 0:
            assert all(start < store.position for store in stores)
        self._plan(Step(one, start, end, loads, stores, PageCopies([], []), PageCopies([], [])))

    def _plan(self, step: Step) -> None:
        """Launches a step with the copies to and from host memory."""
        loads, stores = step.loads, step.stores
        stored = [store.snapshot for store in stores]
        assert len({*stored}) == len(stored)
        busy = {load.snapshot for load in loads}
        for other in self.steps:
            busy |= {one.snapshot for one in (*other.loads, *other.stores)}
        assert busy.isdisjoint(stored), "stored under a step in flight"
        self.cache.take_copies(self.seq)
        copies = self.cache.take_state_copies(self.seq)
        step.to_host, step.from_host = (one or PageCopies([], []) for one in copies)
        self.num_loads += len(step.from_host.slots)
        self.steps.append(step)

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
        for snapshot, number in zip(step.to_host.pages, step.to_host.slots, strict=True):
            self.host_snapshots[number] = self.snapshots[snapshot]
        for slot, number in zip(step.from_host.pages, step.from_host.slots, strict=True):
            self.slots[slot] = self.host_snapshots[number]
        for load in step.loads:
            self.slots[load.slot] = self.snapshots[load.snapshot]
        if step.drafts is not None:
            self._complete_drafts(step)
            return
        one = step.running
        if step.start:
            assert self.slots[one.lease.slot] == _content(one, one.reached), "another state"
        assert one.reached <= step.start
        for store in step.stores:
            if store.position > one.reached:
                self.snapshots[store.snapshot] = _content(one, store.position)
        self.slots[one.lease.slot] = _content(one, step.end)
        one.reached = step.end
        self.cache.complete(self.completed)
        if one in self.running:
            self.cache.end_snapshots(one.lease, self.completed, step.end, step.end)
            self.cache.commit(one.lease, one.row, step.end)

    def _complete_drafts(self, step: Step) -> None:
        raise AssertionError("no step has drafts")

    @rule(count=st.integers(1, 12))
    def pages_run_short(self, count: int) -> None:
        self.cache.evict(count)

    @invariant()
    def every_page_and_snapshot_is_somewhere_once(self) -> None:
        self.cache.check_invariants(one.lease for one in self.running)

    @invariant()
    def what_is_free_is_forgotten(self) -> None:
        pool = self.cache._snapshots
        assert pool is not None
        waiting: set[int] = set()
        if pool.host is not None:
            # What is evicted without need is free, but waits to be stored.
            for stores in (pool.host._stores, *(step.to_host for step in self.steps)):
                waiting.update(stores.pages)
            for number in pool.host._pool.free:
                self.host_snapshots.pop(number, None)
        for snapshot in {*pool._pool.free} - waiting:
            self.snapshots.pop(snapshot, None)
        for slot in self.cache._slots.free:
            self.slots.pop(slot, None)

    @invariant()
    def a_snapshot_is_of_its_prefix(self) -> None:
        pool = self.cache._snapshots
        assert pool is not None
        for root in self.cache._tree._roots.values():
            stack = [(root, ())]
            while stack:
                node, before = stack.pop()
                tokens = before + tuple(array("i", () if node.is_root else node.key))
                for number, page in enumerate(node.pages, 1):
                    content = root.key.decode(), tokens[: len(before) + number * SIZE]
                    snapshot = None if node.on_host else pool._of_page.get(page)
                    if snapshot is not None:
                        assert self.snapshots[snapshot] == content
                    if pool.host is None:
                        continue
                    in_host = pool.host._at.get(Place(node.on_host, page))
                    if in_host is not None and pool.host._pool.passed(pool.host._touched[in_host]):
                        assert self.host_snapshots[in_host] == content
                stack += [(child, tokens) for child in node.children.values()]

    def teardown(self) -> None:
        for one in self.running:
            self.cache.release(one.lease)
        self.running = []
        while self.completed < self.seq:
            self.complete()
        self.seq += 1  # with loads of leases that were released before a step
        self.cache.take_loads(self.seq)
        self.cache.take_copies(self.seq)
        self.cache.take_state_copies(self.seq)
        self.cache.complete(self.seq)
        self.cache.check_invariants([])
        pool = self.cache._snapshots
        assert pool is not None
        assert not pool._pool.num_fenced
        assert not +pool._readers
        self.cache.evict(self.num_pages)
        assert pool._pool.num_free == self.num_snapshots
        if pool.host is not None:
            for root in [*self.cache._tree._roots.values()]:
                self.cache._tree._drop_below(root)
            assert not pool.host._at

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
            self._compute(one, rng.randint(1, 7))
        elif self.running:
            one = rng.choice(self.running)
            self.ended = [*self.ended[-5:], [*one.row]]
            self._release(one)
        self.every_page_and_snapshot_is_somewhere_once()
        self.what_is_free_is_forgotten()

    def _longest(self, row: array[int], salt: str, *, with_host: bool) -> int:
        pool, tree = self.cache._snapshots, self.cache._tree
        assert pool is not None
        match = tree.match(row.tobytes(), (len(row) - 1) // SIZE, salt)
        places = [Place(False, page) for page in match.pages]
        if with_host and match.host_node is not None:
            places += [
                Place(True, slot) for slot in tree.last_pages(match.host_node, match.num_host)
            ]
        hits = [
            count
            for count, place in enumerate(places, 1)
            if (not place.on_host and place.number in pool._of_page)
            or (pool.host is not None and place in pool.host)
        ]
        return max(hits, default=0)


def _content(one: Running, position: int) -> Content:
    return one.salt, tuple(one.row[:position])


class DraftMachine(StateMachine):
    """Requests also draft: where their newest token is, and which snapshots are stored, depends on
    the step in flight."""

    num_missed = num_passed = 0

    @precondition(lambda self: self.running)
    @rule(data=st.data(), drafts=st.integers(0, 4), seed=st.integers(0, 9))
    def draft(self, data: st.DataObject, drafts: int, seed: int) -> None:
        self._draft(data.draw(st.sampled_from(self.running)), drafts, random.Random(seed))

    def _compute(self, one: Running, count: int) -> None:
        while self.steps and (one.unverified or len(self.steps) > 1):
            self.complete()
        super()._compute(one, count)

    def _draft(self, one: Running, drafts: int, rng: random.Random) -> None:
        """Plans a draft row, if all tokens but the newest are computed."""
        while len(self.steps) > 1:
            self.complete()
        if one not in self.running:
            return
        if not one.unverified:
            while self.steps:
                self.complete()
            if one.computed < 1 or one.computed > 60:
                return
            # Tokens after those that are computed are not known yet, but determined.
            one.newest = one.computed
        one.row.extend(rng.choices((0, 1), k=max(0, one.computed + 14 - len(one.row))))
        start, end = one.computed, one.computed + one.unverified + 1 + drafts
        missing = -(-end // SIZE) - len(one.lease.pages)
        if missing > self.cache.num_allocatable:
            return
        if missing > 0:
            self.cache.allocate(one.lease, missing)
        self.seq += 1
        one.lease.fence = self.seq
        one.computed += 1
        loads = self.cache.take_loads(self.seq)
        last = start + one.unverified
        stores = self.cache.take_snapshots(one.lease, start, last, of_drafts=True)
        one.unverified += drafts
        none = PageCopies([], [])
        self._plan(Step(one, start, end, loads, stores, none, none, drafts))

    def _complete_drafts(self, step: Step) -> None:
        one, rng = step.running, random.Random(self.completed)
        assert step.drafts is not None
        # The device may place the row so that it begins before its newest token.
        length = 1 + step.drafts
        least = min(one.newest, step.end - length)
        first = least if rng.random() < 0.3 else one.newest
        assert self.slots[one.lease.slot] == _content(one, one.reached), "another state"
        assert one.reached <= first, "a state cannot go back"
        for store in step.stores:
            if one.reached < store.position <= first:
                self.snapshots[store.snapshot] = _content(one, store.position)
                self.num_passed += 1
            else:
                self.num_missed += 1
        self.slots[one.lease.slot] = _content(one, first)
        one.reached = first
        count = rng.randint(1, max(1, first + length - one.newest))
        self.cache.complete(self.completed)
        if one in self.running:
            self.cache.end_snapshots(one.lease, self.completed, least, one.newest)
            one.unverified -= step.drafts
            one.computed += count - 1
            one.newest += count
            self.cache.commit(one.lease, one.row, one.newest)

    def churn(self, rng: random.Random) -> None:
        if self.running and rng.random() < 0.3:
            one = rng.choice(self.running)
            for _ in range(rng.randint(1, 6)):
                self._draft(one, rng.randint(0, 4), rng)
        super().churn(rng)


class ScarceMachine(StateMachine):
    snapshot_pages = 30


class HostMachine(StateMachine):
    num_pages = 21
    num_host_pages = 60


class ScarceHostMachine(ScarceMachine):
    num_pages = 21
    num_host_pages = 30


def manager(snapshot_pages: int, num_pages: int = 101) -> CacheManager:
    return CacheManager(
        num_pages=num_pages,
        page_size=SIZE,
        num_slots=4,
        block_hash_salt="m",
        enable_prefix_caching=True,
        groups=PageGroups(snapshot_pages=snapshot_pages),
    )


class Alone:
    """A request that computes in its own steps."""

    def __init__(self, cache: CacheManager, tokens: list[int], seq: int) -> None:
        self.cache, self.row, self.seq = cache, array("i", tokens), seq
        match = cache.match(self.row, "")
        self.lease = cache.open(match, "")
        self.num_hit = self.computed = match.num_pages * SIZE

    def compute(self, end: int) -> list[int]:
        """Positions with a snapshot."""
        missing = -(-end // SIZE) - len(self.lease.pages)
        if missing > 0:
            self.cache.allocate(self.lease, missing)
        self.seq += 1
        self.lease.fence = self.seq
        self.cache.take_loads(self.seq)
        stored = self.cache.take_snapshots(self.lease, self.computed, end)
        self.computed = end
        self.cache.complete(self.seq)
        self.cache.commit(self.lease, self.row, end)
        return sorted(one.position for one in stored)


def test_snapshots_of_a_prompt_and_an_output() -> None:
    cache = manager(snapshot_pages=5)
    first = Alone(cache, [*range(40)], 0)
    first.row = first.row[:25]
    # At the end of a step, at intervals of 10, and where the same prompt could continue.
    assert first.compute(17) == [10, 16]
    first.lease.borders = (24,)
    assert first.compute(25) == [20, 24]
    first.row.extend(range(25, 40))
    assert [first.compute(end) for end in range(26, 32)] == [[26], [], [28], [], [30], []]
    cache.release(first.lease)
    # Of the rolling ones, only the last is left.
    pool = cache._snapshots
    assert pool is not None
    assert len(pool._of_page) == 4
    for length, hit in ((40, 30), (30, 24), (24, 20), (20, 10), (10, 0)):
        again = Alone(cache, [*range(length)], 31 + length)
        assert again.num_hit == hit
        cache.release(again.lease)


def test_a_third_prompt_continues_where_two_diverged() -> None:
    cache = manager(snapshot_pages=50)
    first = Alone(cache, [*range(30)], 0)
    first.compute(30)
    second = Alone(cache, [*range(12), 99, 98, 97, 96, 95], 1)
    assert second.num_hit == 0
    assert second.lease.borders == (12, 16)
    assert second.compute(17) == [12, 16]
    third = Alone(cache, [*range(12), 77, 76, 75], 2)
    assert third.num_hit == 12
    cache.check_invariants([first.lease, second.lease, third.lease])


def test_without_room_requests_continue_and_recent_snapshots_are_kept() -> None:
    cache = manager(snapshot_pages=1000)
    pool = cache._snapshots
    assert pool is not None
    for number in range(6):
        one = Alone(cache, [100 * number + at for at in range(9)], number)
        assert one.compute(9) == [8]
        cache.release(one.lease)
    hits = []
    for number in (5, 4, 3, 2, 1, 0):
        again = Alone(cache, [100 * number + at for at in range(9)], 9)
        hits.append(again.num_hit)
        cache.release(again.lease)
    assert hits == [8] * MIN_SNAPSHOTS + [0, 0]
    # While all are being written or read, a step stores none.
    taken = [pool.take() for _ in range(MIN_SNAPSHOTS + 1)]
    assert taken[-1] is None
    assert len({*taken[:-1]}) == MIN_SNAPSHOTS


def test_snapshots_being_loaded_are_not_evicted() -> None:
    steps = CompletedSteps()
    pool = SnapshotPool(2, steps)
    first = pool.take()
    assert first is not None
    assert pool.attach(7, PendingSnapshot(8, first, False))
    pool.load(Place(False, 7), slot=3)
    second = pool.take()
    assert second not in (None, first)
    assert pool.take() is None
    pool.drop_rolling(7)
    assert pool.take_loads(1) == [StateLoad(3, first)]
    assert pool.take() is None
    steps.complete(1)
    assert pool.take() == first


class DraftHostMachine(DraftMachine):
    num_pages = 21
    num_host_pages = 60


@pytest.mark.parametrize("machine_class", [DraftMachine, DraftHostMachine])
def test_snapshots_are_of_accepted_tokens(machine_class: type[DraftMachine]) -> None:
    machine, rng = machine_class(), random.Random(4)
    for number in range(1000):
        machine.churn(rng)
        if number % 10 == 0:
            machine.a_snapshot_is_of_its_prefix()
    assert min(machine.num_passed, machine.num_missed) > 20
    machine.teardown()


@pytest.mark.parametrize("machine_class", [HostMachine, ScarceHostMachine])
def test_snapshots_move_between_tiers(machine_class: type[StateMachine]) -> None:
    machine, rng = machine_class(), random.Random(3)
    for number in range(1000):
        machine.churn(rng)
        if number % 10 == 0:
            machine.a_snapshot_is_of_its_prefix()
    assert machine.cache.host is not None
    assert machine.num_loads > 4
    totals = machine.cache.host.totals
    assert min(totals.num_loaded, totals.num_evicted, totals.num_recomputed) > 4
    machine.teardown()


SETTINGS = settings(max_examples=cases(60), stateful_step_count=50, deadline=None, derandomize=True)
TestStateMachine = StateMachine.TestCase
TestScarceMachine = ScarceMachine.TestCase
TestHostMachine = HostMachine.TestCase
TestScarceHostMachine = ScarceHostMachine.TestCase
TestStateMachine.settings = TestScarceMachine.settings = SETTINGS
TestHostMachine.settings = TestScarceHostMachine.settings = SETTINGS
TestDraftMachine = DraftMachine.TestCase
TestDraftMachine.settings = SETTINGS
