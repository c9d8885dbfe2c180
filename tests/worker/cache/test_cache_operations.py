"""Random leases against a model that is a dictionary of prefixes."""

from __future__ import annotations

from array import array

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from worker.cache.lease import Lease
from worker.cache.manager import CacheManager
from worker.wire.messages import BlockStored

SIZE = 2
NUM_PAGES = 25
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)


class CacheMachine(RuleBasedStateMachine):
    """Leases open with a match, compute some pages per step, commit when steps complete."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = CacheManager(
            num_pages=NUM_PAGES,
            page_size=SIZE,
            num_slots=4,
            block_hash_salt="m",
            enable_prefix_caching=True,
        )
        self.leases: list[tuple[Lease, array[int], str]] = []
        self.content: dict[int, tuple[str, tuple[int, ...]]] = {}
        """By page: the salt and all tokens up to the page's end, as computed."""
        self.mirror: set[int] = set()
        self.seq = 0
        self.completed = 0

    @rule(tokens=TOKENS, salt=st.sampled_from(["", "x"]), count=st.integers(0, 7))
    def open(self, tokens: list[int], salt: str, count: int) -> None:
        row = array("i", tokens)
        match = self.cache.match(row, salt)
        assert len(match.pages) * SIZE < len(tokens), "nothing left to compute"
        for index, page in enumerate(match.pages):
            assert self.content[page] == (salt, tuple(tokens[: (index + 1) * SIZE]))
        missing = min(count, -(-len(tokens) // SIZE) - len(match.pages))
        if not self.cache.num_free_slots:
            return
        if missing > self.cache.num_available - match.num_unlocked:
            return
        lease = self.cache.open(match, salt)
        self.leases.append((lease, row, salt))
        self._compute(lease, row, salt, missing)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), count=st.integers(1, 3), more=TOKENS)
    def extend(self, data: st.DataObject, count: int, more: list[int]) -> None:
        lease, row, salt = data.draw(st.sampled_from(self.leases))
        row.extend(more[: max(0, 40 - len(row))])
        missing = min(count, len(row) // SIZE - len(lease.pages), self.cache.num_available)
        self._compute(lease, row, salt, max(0, missing))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        lease, row, _ = data.draw(st.sampled_from(self.leases))
        if lease.fence <= self.completed:
            self.cache.commit(lease, row, min(len(row), len(lease.pages) * SIZE))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from(self.leases))
        self.leases.remove(item)
        self.cache.release(item[0])

    @precondition(lambda self: self.completed < self.seq)
    @rule()
    def complete(self) -> None:
        self.completed += 1
        self.cache.complete(self.completed)

    @invariant()
    def every_page_is_somewhere_once(self) -> None:
        self.cache.check_invariants(lease for lease, _, _ in self.leases)

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
                assert self.content[page] == (above.key.decode(), prefix)
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
                assert event.parent_hash is None or event.parent_hash in self.mirror
                assert self.mirror.isdisjoint(event.block_hashes)
                self.mirror.update(event.block_hashes)
            else:
                assert self.mirror.issuperset(event.block_hashes)
                self.mirror.difference_update(event.block_hashes)
        nodes = self.cache._tree.nodes()
        assert self.mirror == {h for node in nodes if not node.is_root for h in node.hashes}

    def teardown(self) -> None:
        for lease, _, _ in self.leases:
            self.cache.release(lease)
        while self.completed < self.seq:
            self.complete()
        self.cache.check_invariants([])
        assert self.cache.num_available == NUM_PAGES - 1
        assert not self.cache.is_fenced
        assert self.cache.num_free_slots == 4

    def _compute(self, lease: Lease, row: array[int], salt: str, count: int) -> None:
        """One step that fills `count` new pages of a lease, and its last page further."""
        self.seq += 1
        lease.fence = self.seq
        assert 0 not in self.cache.extend(lease, count)
        for index in range(lease.num_cached_pages, len(lease.pages)):
            self.content[lease.pages[index]] = (salt, tuple(row[: (index + 1) * SIZE]))


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, derandomize=True
)
