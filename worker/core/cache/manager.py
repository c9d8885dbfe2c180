"""The KV cache as the scheduler sees it: leases of pages and slots over a shared prefix cache."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from worker.core.cache.host import NO_COPIES, Copies, HostPool
from worker.core.cache.lease import Lease
from worker.core.cache.match import Match
from worker.core.cache.pool import FencedPool
from worker.core.cache.radix import RadixTree
from worker.wire.blocks import TOKEN_BYTES
from worker.wire.messages import BlockEvent


class CacheManager:
    """Sole owner of pages and slots.

    Each page is free, fenced (waits for a step in flight), cached (the tree's) or owned by one
    lease; each slot is free, fenced or a lease's; each host slot free, fenced or the tree's.

    Args:
        num_pages: pages on the device; page 0 is the dummy and never handed out.
        page_size: tokens per page.
        num_slots: rows of the device's tables.
        block_hash_salt: mixed into block hashes.
        enable_prefix_caching: whether computed pages are kept for later requests.
        num_host_pages: slots in host memory for pages that are evicted; 0 for no such tier.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        num_slots: int,
        block_hash_salt: str,
        enable_prefix_caching: bool,
        num_host_pages: int = 0,
    ) -> None:
        self._page_size = page_size
        self._pages = FencedPool(1, num_pages - 1)
        self._slots = FencedPool(0, num_slots)
        self.host = HostPool(num_host_pages) if num_host_pages else None
        """The tier in host memory; None without one."""
        self._tree = RadixTree(page_size, block_hash_salt, self.host)
        self._enabled = enable_prefix_caching

    @property
    def num_free_slots(self) -> int:
        """Slots that `open` can use now."""
        return self._slots.num_free

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can hand out now: free, or cached and evictable."""
        return self._pages.num_free + self._tree.num_evictable

    @property
    def is_fenced(self) -> bool:
        """Whether pages will come free when a step in flight completes."""
        return bool(self._pages.num_fenced or self._tree.num_fenced)

    def is_idle(self, lease: Lease) -> bool:
        """Whether no step in flight touches a lease: a release would take effect at once."""
        return self._slots.passed(lease.fence)

    def num_held_alone(self, lease: Lease) -> int:
        """Pages that would be available if this lease alone were released."""
        cached = self._tree.num_held_alone(lease.node) if lease.node is not None else 0
        return len(self._own_pages(lease)) + cached

    @property
    def has_events(self) -> bool:
        """Whether `take_events` would return any."""
        return self._tree.has_events

    def match(self, token_ids: array[int], cache_salt: str, *, num_left: int = 1) -> Match:
        """The longest cached prefix that leaves `num_left` tokens to compute. Holds nothing."""
        if not self._enabled:
            return Match(None, [], 0)
        max_pages = (len(token_ids) - num_left) // self._page_size
        return self._tree.match(token_ids.tobytes(), max_pages, cache_salt)

    def open(self, match: Match, cache_salt: str, *, shared: bool = True) -> Lease:
        """Takes a slot and locks a match made just before; the caller saw a free slot.

        What the match has in host memory gets pages, which the next Plan loads; the caller has
        checked `num_available`.

        Unless `shared`, the lease's pages stay out of the prefix cache. One that computes anew
        what is cached would otherwise hold its own pages and lock the cached ones beside them.
        """
        end = match.host_node or match.node
        node = self._tree.lock(end, cache_salt) if self._enabled and shared else None
        lease = Lease(
            slot=self._slots.take(1)[0],
            pages=list(match.pages),
            node=node,
            num_cached_pages=match.num_pages,
        )
        if match.num_host:
            assert node is not None
            self._tree.load(node, self.allocate(lease, match.num_host))
        return lease

    def allocate(self, lease: Lease, count: int) -> list[int]:
        """Adds `count` pages to a lease, evicting as needed; returns them.

        The caller has checked `num_available`.
        """
        missing = count - self._pages.num_free
        if missing > 0:
            # Nothing in flight reads an evictable page: locks end only behind their fence.
            self._pages.release(self._tree.evict(missing), fence=0)
        pages = self._pages.take(count)
        lease.pages += pages
        return pages

    def commit(self, lease: Lease, token_ids: array[int], num_computed: int) -> None:
        """Puts the full pages among the first `num_computed` positions into the prefix cache.

        Only positions whose step has completed count, so that nobody reads a page too early.
        """
        end = num_computed // self._page_size
        start = lease.num_cached_pages
        if end <= start or lease.node is None:
            return
        key = token_ids[start * self._page_size : end * self._page_size].tobytes()
        assert len(key) == (end - start) * self._page_size * TOKEN_BYTES, "tokens not known yet"
        lease.node, duplicates = self._tree.insert(lease.node, key, lease.pages[start:end])
        lease.duplicates += duplicates
        lease.num_cached_pages = end

    def release(self, lease: Lease) -> None:
        """Ends a lease; what it held is usable again once step `lease.fence` has completed."""
        self._pages.release(self._own_pages(lease), lease.fence)
        self._slots.release([lease.slot], lease.fence)
        if lease.node is not None:
            self._tree.unlock(lease.node, lease.fence)

    def complete(self, seq: int) -> None:
        """Notes that step `seq` has completed."""
        self._pages.complete(seq)
        self._slots.complete(seq)
        self._tree.complete(seq)
        if self.host is not None:
            self.host.complete(seq)

    def take_copies(self, seq: int) -> tuple[Copies, Copies]:
        """Stores and loads that Plan `seq` makes, in this order and before its rows.

        Every Plan takes them.
        """
        return (NO_COPIES, NO_COPIES) if self.host is None else self.host.take_copies(seq)

    def take_events(self) -> list[BlockEvent]:
        """What entered and left the prefix cache since the last call, in that order."""
        return self._tree.take_events()

    def check_invariants(self, leases: Iterable[Lease]) -> None:
        """Asserts that `leases` are all there are, and that nothing is lost or owned twice."""
        leases = list(leases)
        nodes = list(self._tree.nodes())
        cached = [page for node in nodes if not node.on_host for page in node.pages]
        owned = [page for lease in leases for page in self._own_pages(lease)]
        self._pages.check_invariants([*cached, *owned])
        self._slots.check_invariants(lease.slot for lease in leases)
        if self.host is not None:
            self.host.check_invariants(slot for n in nodes if n.on_host for slot in n.pages)
        self._tree.check_invariants([lease.node for lease in leases if lease.node is not None])

    @staticmethod
    def _own_pages(lease: Lease) -> list[int]:
        return lease.pages[lease.num_cached_pages :] + lease.duplicates
