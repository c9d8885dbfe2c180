"""Random leases against a model that is a dictionary of prefixes."""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.effort import cases
from worker.core.cache.lease import Lease
from worker.core.cache.manager import CacheManager
from worker.plan.plan import PageCopies
from worker.protocol.messages import BlockStored

SIZE = 2
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)


Content = tuple[str, tuple[int, ...]]
"""Salt and all tokens up to the end of a page."""


class Step(NamedTuple):
    """A step in flight: copies and writes, and the expected content of the lease's pages."""

    stores: PageCopies
    loads: PageCopies
    written: dict[int, Content]
    read: dict[int, Content]


class CacheMachine(RuleBasedStateMachine):
    """Leases open with a match, compute some pages per step, commit when steps complete.

    The copies and writes of a step happen as late as it completes; free memory is overwritten
    meanwhile.
    """

    num_pages = 25
    num_host_pages = 0

    def __init__(self) -> None:
        super().__init__()
        self.cache = CacheManager(
            num_pages=self.num_pages,
            page_size=SIZE,
            num_slots=4,
            block_hash_salt="m",
            enable_prefix_caching=True,
            num_host_pages=self.num_host_pages,
        )
        self.leases: list[tuple[Lease, array[int], str]] = []
        self.content: dict[int, Content] = {}
        """Content by page when all launched steps have completed."""
        self.host_content: dict[int, Content] = {}
        """The same by host slot."""
        self.pages: dict[int, Content] = {}
        """Current content by page."""
        self.slots: dict[int, Content] = {}
        """Current content by host slot."""
        self.steps: deque[Step] = deque()
        self.mirror: dict[str, set[int]] = {"device": set(), "host": set()}
        self.seq = 0
        self.completed = 0
        self.loading: deque[int] = deque()
        self.loads_now = 0

    @rule(
        tokens=TOKENS,
        salt=st.sampled_from(["", "", "", "x"]),
        count=st.integers(0, 7),
        computes=st.booleans(),
    )
    def open(self, tokens: list[int], salt: str, count: int, computes: bool) -> None:
        row = array("i", tokens)
        match = self.cache.match(row, salt)
        assert match.num_pages * SIZE < len(tokens), "nothing left to compute"
        for index, page in enumerate(match.pages):
            assert self.content[page] == (salt, tuple(tokens[: (index + 1) * SIZE]))
        missing = min(count, -(-len(tokens) // SIZE) - match.num_pages)
        if not self.cache.num_free_slots:
            return
        if computes:
            # As if recomputing is faster than a copy: the host's content is superseded later.
            missing += match.num_host
            match = match._replace(host_node=None, num_host=0)
        if missing + match.num_host > self.cache.num_available - match.num_unlocked:
            return
        lease = self.cache.open(match, salt)
        self.leases.append((lease, row, salt))
        self._compute(lease, row, salt, missing)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), count=st.integers(1, 3), more=TOKENS)
    def extend(self, data: st.DataObject, count: int, more: list[int]) -> None:
        self._extend(data.draw(st.sampled_from(self.leases)), count, more)

    def _extend(self, item: tuple[Lease, array[int], str], count: int, more: list[int]) -> None:
        lease, row, salt = item
        row.extend(more[: max(0, 40 - len(row))])
        missing = min(count, len(row) // SIZE - len(lease.pages), self.cache.num_available)
        self._compute(lease, row, salt, max(0, missing))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        self._commit(data.draw(st.sampled_from(self.leases)))

    def _commit(self, item: tuple[Lease, array[int], str]) -> None:
        lease, row, _ = item
        if lease.fence <= self.completed:
            self.cache.commit(lease, row, min(len(row), len(lease.pages) * SIZE))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self._release(data.draw(st.sampled_from(self.leases)))

    def _release(self, item: tuple[Lease, array[int], str]) -> None:
        self.leases.remove(item)
        self.cache.release(item[0])

    @precondition(lambda self: self.completed < self.seq)
    @rule(lag=st.integers(0, 3))
    def complete(self, lag: int = 0) -> None:
        """Loads are reported to end up to three steps after their own."""
        self.completed += 1
        step = self.steps.popleft()
        self._run(step)
        if step.loads.pages:
            self.loading.append(self.completed)
        while self.loading and self.loading[0] <= max(self.completed - lag, self.loads_now):
            self.loading.popleft()
        self.cache.complete(self.completed, self.loading[0] if self.loading else 0)

    def churn(self, seed: int, count: int) -> None:
        """Many random operations, since evictions only start when all pages are in use."""
        rng = random.Random(seed)
        for _ in range(count):
            kind = rng.randrange(8)
            more = rng.choices((0, 1), k=rng.randint(1, 14))
            if kind < 2:
                self.open(more, rng.choice(("", "", "x")), rng.randint(0, 7), rng.random() < 0.3)
            elif kind < 5 and self.completed < self.seq:
                self.complete(rng.randint(0, 3))
            elif self.leases:
                item = rng.choice(self.leases)
                self._commit(item)
                if kind == 5:
                    self._extend(item, rng.randint(1, 3), more)
                elif kind == 6:
                    self._release(item)
            self.what_is_free_is_overwritten()
            self.every_page_is_somewhere_once()
            self.pages_of_a_lease_hold_its_tokens()

    @invariant()
    def every_page_is_somewhere_once(self) -> None:
        self.cache.check_invariants(lease for lease, _, _ in self.leases)

    @invariant()
    def what_is_free_is_overwritten(self) -> None:
        for page in self.cache._pages.free:
            self.pages.pop(page, None)
        if self.cache.host is not None:
            for slot in self.cache.host._slots.free:
                self.slots.pop(slot, None)

    @invariant()
    def the_tree_holds_what_its_pages_contain(self) -> None:
        seen = set()
        for node in self.cache._tree.nodes():
            if node.is_root:
                continue
            tokens = array("i", node.key)
            above = node.parent
            while above is not None and not above.is_root:
                tokens = array("i", above.key) + tokens
                above = above.parent
            assert above is not None
            start = len(tokens) - len(node.pages) * SIZE
            for index, page in enumerate(node.pages):
                prefix = tuple(tokens[: start + (index + 1) * SIZE])
                held = self.host_content if node.on_host else self.content
                assert held[page] == (above.key.decode(), prefix)
                assert (above.key, prefix) not in seen, "one prefix cached twice"
                seen.add((above.key, prefix))

    @invariant()
    def pages_of_a_lease_hold_its_tokens(self) -> None:
        for lease, row, salt in self.leases:
            for index, page in enumerate(lease.pages):
                prefix = tuple(row[: (index + 1) * SIZE])
                assert self.content[page][0] == salt
                assert self.content[page][1] == prefix[: len(self.content[page][1])]

    @invariant()
    def events_describe_the_tree(self) -> None:
        for event in self.cache.take_events():
            if isinstance(event, BlockStored):
                anywhere = self.mirror["device"] | self.mirror["host"]
                assert event.parent_hash is None or event.parent_hash in anywhere
                assert self.mirror[event.tier].isdisjoint(event.block_hashes)
                self.mirror[event.tier].update(event.block_hashes)
            else:
                assert self.mirror[event.tier].issuperset(event.block_hashes)
                self.mirror[event.tier].difference_update(event.block_hashes)
        nodes = [node for node in self.cache._tree.nodes() if not node.is_root]
        for tier, hashes in self.mirror.items():
            assert hashes == {h for n in nodes if n.on_host == (tier == "host") for h in n.hashes}

    def teardown(self) -> None:
        for lease, _, _ in self.leases:
            self.cache.release(lease)
        self.seq += 1  # with loads of leases that were released before a step
        self._take_copies({}, {})
        while self.completed < self.seq:
            self.complete()
        self.cache.check_invariants([])
        assert self.cache.num_available == self.num_pages - 1
        assert not self.cache.is_fenced
        assert self.cache.num_free_slots == 4
        if self.cache.host is not None:
            used = self.cache.host.totals.num_used
            assert used == len(self.mirror["host"])
            assert self.cache.host.num_free + used == self.num_host_pages

    def _compute(self, lease: Lease, row: array[int], salt: str, count: int) -> None:
        """One step that fills `count` new pages of a lease, and more of its last page."""
        self.seq += 1
        lease.fence = self.seq
        assert 0 not in self.cache.allocate(lease, count)
        written: dict[int, Content] = {}
        read: dict[int, Content] = {}
        for index, page in enumerate(lease.pages):
            target = read if index < lease.num_cached_pages else written
            target[page] = (salt, tuple(row[: (index + 1) * SIZE]))
        if self.cache.is_loading(lease):
            self.cache.load_now(self.seq)
            self.loads_now = self.seq
        self._take_copies(written, read)

    def _take_copies(self, written: dict[int, Content], read: dict[int, Content]) -> None:
        copies = self.cache.take_copies(self.seq)
        stores, loads, later = (one or PageCopies([], []) for one in copies)
        assert set(later.pages) <= set(loads.pages)
        assert set(stores.pages).isdisjoint(loads.pages)
        stores = PageCopies(stores.pages + later.pages, stores.slots + later.slots)
        _copy(stores.pages, self.content, stores.slots, self.host_content)
        _copy(loads.slots, self.host_content, loads.pages, self.content)
        self.content |= written
        self.steps.append(Step(stores, loads, written, read))

    def _run(self, step: Step) -> None:
        _copy(step.stores.pages, self.pages, step.stores.slots, self.slots)
        _copy(step.loads.slots, self.slots, step.loads.pages, self.pages)
        for page, expected in step.read.items():
            assert self.pages[page] == expected, "a page was overwritten under a step in flight"
        self.pages |= step.written


def _copy(
    sources: Sequence[int],
    source: dict[int, Content],
    targets: Sequence[int],
    target: dict[int, Content],
) -> None:
    """Raises KeyError if a source was overwritten."""
    target |= dict(zip(targets, [source[number] for number in sources], strict=True))


class HostMachine(CacheMachine):
    num_pages = 9

    @rule(seed=st.integers(0, 2**16), count=st.integers(1, 40))
    def churn(self, seed: int, count: int) -> None:
        super().churn(seed, count)


class LargeHostMachine(HostMachine):
    num_host_pages = 100


class SmallHostMachine(HostMachine):
    num_host_pages = 4


TestCacheMachine = CacheMachine.TestCase
TestLargeHostMachine = LargeHostMachine.TestCase
TestSmallHostMachine = SmallHostMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=cases(100), stateful_step_count=50, deadline=None, derandomize=True
)
TestLargeHostMachine.settings = TestSmallHostMachine.settings = settings(
    max_examples=cases(40), stateful_step_count=20, deadline=None, derandomize=True
)


@pytest.mark.parametrize("machine_class", [LargeHostMachine, SmallHostMachine])
def test_every_kind_of_move_happens(machine_class: type[CacheMachine]) -> None:
    machine = machine_class()
    for seed in range(30):
        machine.churn(seed, 40)
        machine.the_tree_holds_what_its_pages_contain()
        machine.events_describe_the_tree()
    assert machine.cache.host is not None
    totals = machine.cache.host.totals
    assert min(totals.num_stored, totals.num_loaded) > 5
    assert min(totals.num_evicted, totals.num_recomputed) > 5
    machine.teardown()
