"""KV cache interface of the scheduler: leases of pages and slots, with a shared prefix cache."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable

from worker.core.cache.blocks import BlockPool
from worker.core.cache.fence import CompletedSteps, Fence
from worker.core.cache.host import HostPool, HostTier, TakenCopies
from worker.core.cache.host_blocks import HostBlocks
from worker.core.cache.host_snapshots import HostSnapshots, Place
from worker.core.cache.lease import Lease, Match
from worker.core.cache.lease_snapshots import LeaseSnapshots
from worker.core.cache.pool import FencedPool
from worker.core.cache.radix import RadixTree
from worker.core.cache.snapshots import HostStatePages, PendingSnapshot, SnapshotPool
from worker.plan.plan import PageCopies, StateLoad
from worker.protocol.blocks import TOKEN_BYTES
from worker.protocol.messages import BlockEvent
from worker.protocol.page_groups import ONE_GROUP, PageGroups


class CacheManager:
    """Owns all pages and slots.

    Each page is free, fenced (waiting for a step in flight), cached (in the tree) or owned by one
    lease; each slot is free, fenced or owned by a lease; each host slot is free, fenced or in the
    tree.

    For models with sliding windows, leases and the tree use blocks (see BlockPool), which have a
    page in every group of layers. A lease releases pages of window groups once they are behind its
    window: they are freed, or stay cached until their memory is needed. Page counts include all
    groups. For other models, a block is a page.

    For layers with a state per request (linear attention), the state is in the request's slot. A
    cached prefix can be continued at snapshots of the state (see SnapshotPool).

    In host memory, blocks keep the window pages that they had when they were evicted (HostBlocks),
    and pages keep their snapshots (HostSnapshots). A cached prefix ends at the last position where
    both tiers together have everything needed to continue.

    Loads from host memory are asynchronous: steps continue in the meantime. A lease whose loads
    have not completed has no rows (`is_loading`). If it is released, it keeps its slot and pages
    until they have completed.

    Args:
        num_pages: number of pages on the device; page 0 is the dummy page and never allocated.
        page_size: tokens per page.
        num_slots: number of rows of the device tables.
        block_hash_salt: salt of block hashes.
        enable_prefix_caching: whether computed pages are kept for later requests.
        num_host_pages: slots in host memory for evicted pages; 0 disables the tier.
        groups: layer groups with separate pages.
        step_tokens: token budget of one step.
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
        groups: PageGroups = ONE_GROUP,
        step_tokens: int = 1,
    ) -> None:
        self._page_size = page_size
        self._groups = groups
        self._step_tokens = step_tokens
        steps = self._steps = CompletedSteps()
        copied = self._copied = CompletedSteps()
        """Steps that have completed with all their loads; only used with a host tier."""
        self._released = Fence(copied, self._release)
        """Leases that were released before their loads had completed."""
        self._loading: deque[int] = deque()
        """Plans whose loads have not completed, oldest first."""
        self._loads_now = 0
        """Last Plan whose rows wait for the Plan's own loads; 0 if there was none."""
        self._pages = FencedPool(1, num_pages - 1, steps)
        self._slots = FencedPool(0, num_slots, steps)
        self._blocks: BlockPool | None = None
        """Block pool; None if there is a single group of full-attention layers, for which a block
        is a page."""
        if groups.num_groups > 1 or groups.num_window > 0:
            self._blocks = BlockPool(self._pages, groups, page_size, steps)
        self.host = HostPool(num_host_pages, copied) if num_host_pages else None
        """Host-memory tier; None if disabled."""
        num_snapshots = groups.num_snapshots(num_pages - 1) if enable_prefix_caching else 0
        self.keeps_states = num_snapshots > 0
        """Whether layers have states, so that `take_snapshots` must be called."""
        self._num_groups = groups.num_groups
        self.num_blocks = (num_pages - 1) // self._num_groups
        """Number of blocks on the device."""
        assert not num_snapshots or self._blocks is None, "states and windows in one model"
        self._snapshots: SnapshotPool | None = None
        self._lease_snapshots: LeaseSnapshots | None = None
        """Snapshots that steps in flight are storing; None, like `_snapshots`, if no layer has
        states."""
        if num_snapshots:
            in_host = None
            if num_host_pages:
                in_host = HostSnapshots(groups.num_snapshots(num_host_pages), copied)
            self._snapshots = SnapshotPool(num_snapshots, steps, in_host)
            stride = self.snapshot_pages * page_size
            self._lease_snapshots = LeaseSnapshots(self._snapshots, page_size, stride, steps)
        self._host_blocks: HostBlocks | None = None
        """Blocks in host memory; None unless layers have windows and the tier is enabled."""
        self._tree = RadixTree(page_size, block_hash_salt, num_pages - 1, steps, self._host_tier())
        self.events = self._tree.events
        """Blocks that entered or left the prefix cache since the last `take_events`."""
        self._enabled = enable_prefix_caching

    @property
    def num_free_slots(self) -> int:
        """Number of slots available to `open`."""
        return self._slots.num_free

    @property
    def snapshot_pages(self) -> int:
        """Number of pages that take as much memory as a state; 0 if there are no states."""
        return self._groups.snapshot_pages

    @property
    def has_windows(self) -> bool:
        """Whether any layers have windows; otherwise, `advance` has no effect."""
        return self._blocks is not None

    @property
    def num_available(self) -> int:
        """Number of pages that are free, or cached and evictable."""
        num_pages = len(self._pages.free) + self._groups.num_full * self._tree.num_evictable
        return num_pages if self._blocks is None else num_pages + self._blocks.num_idle_pages

    @property
    def num_allocatable(self) -> int:
        """Number of blocks that `allocate` can hand out now."""
        return self.num_available // self._num_groups

    @property
    def is_fenced(self) -> bool:
        """Whether a step in flight or a load will free pages when it completes."""
        num_fenced = self._pages.num_fenced + self._tree.num_fenced + len(self._released)
        return bool(num_fenced if self._blocks is None else num_fenced + self._blocks.num_fenced)

    @property
    def loaded(self) -> int:
        """The last Plan for which all loads up to and including its own have completed or are
        awaited (`Plan.loaded`)."""
        return max(self._copied.last, self._loads_now)

    @property
    def has_loads(self) -> bool:
        """Whether any loads of earlier Plans have not completed."""
        return bool(self._loading)

    @property
    def num_to_load(self) -> int:
        """Number of pages that the next Plan loads; a state counts as `snapshot_pages` pages."""
        if self.host is None:
            return 0
        num_pages = self.host.num_to_load
        if self._snapshots is not None and self._snapshots.host is not None:
            num_pages += self.snapshot_pages * self._snapshots.host.num_to_load
        return num_pages

    def is_loading(self, lease: Lease) -> bool:
        """Whether a lease's pages or state are still being loaded from host memory, so that it
        cannot have a row."""
        return lease.load_seq > self._copied.last and lease.load_seq > self._loads_now

    def load_now(self, seq: int) -> None:
        """Makes the next Plan, number `seq`, wait for its own and all earlier loads before its rows
        run."""
        self._loads_now = seq

    def await_loads(self) -> bool:
        """Makes the next Plan wait for the oldest loads that have not completed; returns False if
        there are none. No step may be in flight."""
        if not self._loading:
            return False
        self._end_loads(self._loading[0])
        return True

    def complete(self, seq: int, loading: int = 0) -> None:
        """Marks a step as completed.

        Args:
            seq: number of the step.
            loading: first Plan whose loads have not completed; 0 if all have.
        """
        self._steps.complete(seq)
        if self.host is not None:
            self._end_loads(min(seq, loading - 1) if loading else seq)

    def is_idle(self, lease: Lease) -> bool:
        """Whether neither a step in flight nor a load uses a lease, so that a release takes effect
        immediately."""
        return self._slots.passed(lease.fence) and lease.load_seq <= self._copied.last

    def num_held_alone(self, lease: Lease) -> int:
        """Number of pages that would become available if `lease` were released."""
        cached = self._tree.num_held_alone(lease.node) if lease.node is not None else 0
        num_pages = self._groups.num_full * (len(self._exclusive_pages(lease)) + cached)
        if self._blocks is None:
            return num_pages
        alone = self._blocks.num_used_alone(lease.pages[lease.first_seen :])
        return num_pages + self._groups.num_window * alone

    def num_needed(self, num_tokens: int, match: Match) -> int:
        """Number of pages that a request needs to grow to `num_tokens`, in addition to a match's
        device pages."""
        num_cached = len(match.pages)
        first_seen = 0 if self._blocks is None else self._blocks.first_seen(match.num_pages)
        return self._num_to_take(num_tokens, num_cached, max(0, num_cached - first_seen))

    def num_still_needed(self, num_tokens: int, lease: Lease) -> int:
        """Number of pages that a lease needs to grow to `num_tokens`, in addition to those
        it has."""
        num_blocks = len(lease.pages)
        return self._num_to_take(num_tokens, num_blocks, num_blocks - lease.first_seen)

    def match(
        self, token_ids: array[int], cache_salt: str, *, num_left: int = 1, with_host: bool = True
    ) -> Match:
        """Longest cached prefix that leaves at least `num_left` tokens to compute. Locks nothing.

        Args:
            token_ids: tokens of the request.
            cache_salt: cache salt of the request.
            num_left: minimum number of tokens to compute.
            with_host: whether pages in host memory are included.
        """
        if not self._enabled:
            return Match(None, [], 0)
        max_pages = (len(token_ids) - num_left) // self._page_size
        key = token_ids.tobytes()
        match = self._tree.match(key, max_pages, cache_salt)
        num_cached = match.num_pages
        if not with_host and match.num_host:
            match = match._replace(host_node=None, num_host=0)
        num_hit = self._longest_hit(match)
        if num_hit < match.num_pages:
            match = self._tree.match(key, num_hit, cache_salt)
        if match.num_host:
            alone = match._replace(host_node=None, num_host=0)
            match = match._replace(num_alone=self._longest_hit(alone))
        if self._snapshots is not None:
            borders = (num_cached * self._page_size, max_pages * self._page_size)
            return match._replace(borders=borders)
        blocks = self._blocks
        if blocks is None or not match.pages:
            return match
        idle = blocks.num_idle(match.pages[blocks.first_seen(match.num_pages) :])
        num_unlocked = self._groups.num_full * match.num_unlocked + self._groups.num_window * idle
        return match._replace(num_unlocked=num_unlocked)

    def open(self, match: Match, cache_salt: str, *, shared: bool = True) -> Lease:
        """Takes a free slot and locks a match that was just made; returns the lease.

        Pages of the match that are in host memory get device pages, which the next Plan loads. The
        caller must check `num_free_slots` and `num_available`.

        Unless `shared`, the lease does not use the prefix cache. This is for requests that must
        recompute cached tokens: they need their own pages anyway, and would otherwise lock the
        cached pages, too.
        """
        end = match.host_node or match.node
        node = self._tree.lock(end, cache_salt) if self._enabled and shared else None
        lease = Lease(
            slot=self._slots.take(1)[0],
            pages=list(match.pages),
            node=node,
            num_cached_pages=match.num_pages,
            borders=match.borders,
            load_seq=match.loading,
            state_start=match.num_pages * self._page_size,
            state_end=match.num_pages * self._page_size,
        )
        loads = match.num_host > 0
        if self._snapshots is not None and end is not None:
            # Done before pages are loaded, since the evictions for them must not take its snapshot.
            on_host, last = match.host_node is not None, self._tree.last_pages(end, 1)[0]
            loads = self._snapshots.load(Place(on_host, last), lease.slot) or loads
        if loads:
            assert self.host is not None
            lease.load_seq = self.host.next_seq
        if self._blocks is not None:
            lease.first_seen = self._blocks.first_seen(match.num_pages)
            self._blocks.use(lease.pages[lease.first_seen :])
        if match.num_host:
            assert node is not None
            pages = self._allocate_for_load(lease, match.num_host)
            self._tree.load(node, pages, lease.load_seq)
        return lease

    def allocate(self, lease: Lease, count: int) -> list[int]:
        """Adds `count` pages to a lease, evicting as needed; returns them.

        The caller must check `num_allocatable`.
        """
        if self._blocks is not None:
            self._make_free(count * self._groups.num_groups, self._blocks)
            pages = self._blocks.take(count)
            lease.pages += pages
            return pages
        missing = count - self._pages.num_free
        if missing > 0:
            self.evict(missing)
        pages = self._pages.take(count)
        lease.pages += pages
        return pages

    def evict(self, count: int) -> None:
        """Frees up to `count` evictable cached pages, for models without sliding windows."""
        # No step in flight reads an evictable page: locks end only after their fence.
        pages = self._tree.evict(count)
        if self._snapshots is not None:
            self._snapshots.forget(pages)
        self._pages.release(pages, fence=0)

    def page_rows(self, lease: Lease, start: int = 0) -> list[tuple[int, list[int]]]:
        """Page-table entries of a lease, starting at index `start`: for each group of layers, the
        index of the first page and the page ids."""
        if self._blocks is None:
            return [(start, lease.pages[start:])]
        return self._blocks.rows(lease.pages, start, lease.first_seen)

    def advance(self, lease: Lease, position: int) -> None:
        """Releases the window-group pages that are not needed by queries at or after the last page
        boundary up to `position`.

        All steps that compute earlier positions must have completed, and their pages must have been
        committed.
        """
        assert self._blocks is not None, "no layer has a sliding window"
        first = self._first_seen_from(position, lease)
        if first > lease.first_seen:
            # HAZARD(fence): steps in flight mask these pages, but their tables still refer to them.
            passed = lease.pages[lease.first_seen : first]
            self._blocks.end_use(passed, lease.fence, lease_ends=False)
            lease.first_seen = first

    def will_advance(self, lease: Lease, position: int) -> bool:
        """Whether `advance` would release pages once `position` is reached."""
        return self._blocks is not None and (
            self._first_seen_from(position, lease) > lease.first_seen
        )

    def commit(self, lease: Lease, token_ids: array[int], num_computed: int) -> None:
        """Adds the full pages of the first `num_computed` positions to the prefix cache.

        The steps of all these positions must have completed, so that no page is read too early.
        """
        end = num_computed // self._page_size
        start = lease.num_cached_pages
        if lease.node is None:
            return
        if end > start:
            self._insert(lease, token_ids, start, end)
        if lease.snapshots and self._lease_snapshots is not None:
            self._lease_snapshots.attach(lease, self._tree)

    def _insert(self, lease: Lease, token_ids: array[int], start: int, end: int) -> None:
        """Adds the pages of a lease from index `start` to `end` to the prefix cache."""
        assert lease.node is not None
        key = token_ids[start * self._page_size : end * self._page_size].tobytes()
        assert len(key) == (end - start) * self._page_size * TOKEN_BYTES, "tokens not known yet"
        lease.node, duplicates = self._tree.insert(lease.node, key, lease.pages[start:end])
        lease.duplicates += duplicates
        lease.num_cached_pages = end
        if self._blocks is not None:
            self._blocks.cache(lease.pages[start + len(duplicates) : end])
            if duplicates:
                # Cached blocks without window pages get those of the lease's blocks, and replace
                # the lease's blocks.
                cached = self._tree.last_pages(lease.node, end - start)
                for index, (duplicate, other) in enumerate(
                    zip(duplicates, cached, strict=False), start
                ):
                    if self._blocks.move_window(duplicate, other):
                        lease.pages[index] = other

    def release(self, lease: Lease) -> None:
        """Ends a lease; its slot and pages can be reused once step `lease.fence` and its loads have
        completed."""
        if lease.load_seq <= self._copied.last:
            self._release(lease)
        else:
            self._released.hold(lease, lease.load_seq)

    def _release(self, lease: Lease) -> None:
        if self._blocks is None:
            self._pages.release(self._exclusive_pages(lease), lease.fence)
        else:
            seen = lease.pages[lease.first_seen :]
            self._blocks.end_use(seen, lease.fence, lease_ends=True)
            self._blocks.release(self._exclusive_pages(lease), lease.fence)
        if self._snapshots is not None:
            self._snapshots.cancel(lease.slot)
            self._snapshots.keep(lease.rolling_page)
            pending = [pending.snapshot for pending in lease.snapshots]
            self._snapshots.release(pending, lease.fence)
        self._slots.release([lease.slot], lease.fence)
        if lease.node is not None:
            self._tree.unlock(lease.node, lease.fence)

    def take_copies(self, seq: int) -> TakenCopies:
        """Returns the page copies of Plan `seq`, in the format of `Plan`. Must be called for every
        Plan, before `take_state_copies`."""
        if self.host is None:
            return TakenCopies(None, None)
        if self.num_to_load:
            self._loading.append(seq)
        return self.host.take_copies(seq)

    def take_loads(self, seq: int) -> list[StateLoad]:
        """Returns the snapshots that Plan `seq` copies into the states of slots, before its rows.

        Must be called for every Plan.
        """
        return [] if self._snapshots is None else self._snapshots.take_loads(seq)

    def take_state_copies(self, seq: int) -> tuple[PageCopies | None, PageCopies | None]:
        """Returns the copies between states and host memory of Plan `seq`, in the format of `Plan`;
        None if there are none.

        Must be called for every Plan, after `take_snapshots`, which may move snapshots to the host.
        """
        if self._snapshots is None or self._snapshots.host is None:
            return None, None
        return self._snapshots.host.take_copies(seq)

    def take_snapshots(
        self, lease: Lease, start: int, end: int, *, of_drafts: bool = False
    ) -> list[PendingSnapshot]:
        """Takes snapshots for the step `lease.fence`, which computes positions [start, end) of a
        lease, as in `LeaseSnapshots.take`."""
        assert self._lease_snapshots is not None, "no layer has states"
        return self._lease_snapshots.take(lease, start, end, of_drafts=of_drafts)

    def end_snapshots(self, lease: Lease, seq: int, stored_to: int, state_end: int) -> None:
        """Ends the snapshots of a completed row, as in `LeaseSnapshots.end`; call it before
        `commit`."""
        assert self._lease_snapshots is not None, "no layer has states"
        self._lease_snapshots.end(lease, seq, stored_to, state_end)

    def take_events(self) -> list[BlockEvent]:
        """Returns the blocks that entered or left the prefix cache since the last call, in the
        order of these events."""
        events = self.events.copy()
        self.events.clear()
        return events

    def check_invariants(self, leases: Iterable[Lease]) -> None:
        """Asserts that `leases` are exactly the open leases, and that pages and slots have exactly
        one owner."""
        leases = [*leases, *self._released]
        nodes = list(self._tree.nodes())
        cached = [page for node in nodes if not node.on_host for page in node.pages]
        owned = [page for lease in leases for page in self._exclusive_pages(lease)]
        if self._blocks is None:
            self._pages.check_invariants([*cached, *owned])
        else:
            used = [page for lease in leases for page in lease.pages[lease.first_seen :]]
            self._blocks.check_invariants(cached, owned, used)
        self._slots.check_invariants(lease.slot for lease in leases)
        if self._snapshots is not None:
            pending = [snapshot.snapshot for lease in leases for snapshot in lease.snapshots]
            self._snapshots.check_invariants(pending, cached)
        if self.host is not None:
            self._check_host([entry for n in nodes if n.on_host for entry in n.pages], cached)
        self._tree.check_invariants([lease.node for lease in leases if lease.node is not None])

    def _end_loads(self, seq: int) -> None:
        """Marks the loads of all Plans up to `seq` as completed."""
        while self._loading and self._loading[0] <= seq:
            self._loading.popleft()
        if seq > self._copied.last:
            self._copied.complete(seq)

    def _check_host(self, held: list[int], cached: list[int]) -> None:
        """Asserts that `held` are exactly the entries of the host tier."""
        assert self.host is not None
        if self._host_blocks is not None:
            self._host_blocks.check_invariants(held)
            held = self._host_blocks.slots(held)
        self.host.check_invariants(held)
        if self._snapshots is not None and self._snapshots.host is not None:
            places = [*(Place(False, page) for page in cached), *(Place(True, s) for s in held)]
            self._snapshots.host.check_invariants(places)

    def _host_tier(self) -> HostTier | None:
        """The tree's host tier, including the window pages or snapshots of its pages."""
        if self.host is None:
            return None
        if self._blocks is not None:
            self._host_blocks = HostBlocks(self.host, self._blocks)
            return self._host_blocks
        return self.host if self._snapshots is None else HostStatePages(self.host, self._snapshots)

    def _longest_hit(self, match: Match) -> int:
        """Number of leading pages of a match from which a request can continue. In models with
        windows, all pages in the window must have their window pages; in hybrid models, the last
        page must have a snapshot."""
        slots: list[int] = []
        if match.host_node is not None and (self._snapshots or self._blocks):
            slots = self._tree.last_pages(match.host_node, match.num_host)
        if self._snapshots is not None:
            return self._snapshots.longest_hit(match.pages, slots)
        if self._blocks is None:
            return match.num_pages
        on_host = [] if self._host_blocks is None else map(self._host_blocks.has_window, slots)
        return self._blocks.longest_hit(match.pages, list(on_host))

    def _allocate_for_load(self, lease: Lease, count: int) -> list[int]:
        """Adds `count` pages to a lease, for the pages of its match that are in host memory;
        returns them.

        With windows, blocks behind the window get no window pages.
        """
        if self._blocks is None:
            return self.allocate(lease, count)
        num_seen = min(count, len(lease.pages) + count - lease.first_seen)
        groups = self._groups
        self._make_free(groups.num_full * count + groups.num_window * num_seen, self._blocks)
        behind = self._blocks.take(count - num_seen, seen=False)
        loaded = behind + self._blocks.take(num_seen)
        self._blocks.cache(loaded)
        lease.pages += loaded
        return loaded

    def _num_to_take(self, num_tokens: int, num_blocks: int, num_seen: int) -> int:
        """Number of pages needed to grow to `num_tokens` from `num_blocks` blocks, of which
        `num_seen` have window pages."""
        num_needed = -(-num_tokens // self._page_size)
        num_pages = self._groups.num_full * max(0, num_needed - num_blocks)
        if self._blocks is not None:
            max_blocks = self._groups.max_window_blocks(self._page_size, self._step_tokens)
            num_pages += self._groups.num_window * max(0, min(num_needed, max_blocks) - num_seen)
        return num_pages

    def _first_seen_from(self, position: int, lease: Lease) -> int:
        """Index of the first block whose window pages a lease at `position` keeps: those that it
        reads, and those that a request continuing after its last full page would read."""
        border = position - position % self._page_size
        return min(self._groups.first_block(border, self._page_size), len(lease.pages))

    def _make_free(self, count: int, blocks: BlockPool) -> None:
        """Frees pages until `count` are free: window pages behind windows, then evictions from the
        tree, then window pages near the ends of leases."""
        blocks.reclaim(count, ends=False)
        while (missing := count - self._pages.num_free) > 0:
            # No step in flight reads an evictable page: locks end only after their fence.
            evicted = self._tree.evict(-(-missing // self._groups.num_groups))
            if not evicted:
                break
            blocks.evict(evicted)
        blocks.reclaim(count, ends=True)

    @staticmethod
    def _exclusive_pages(lease: Lease) -> list[int]:
        return lease.pages[lease.num_cached_pages :] + lease.duplicates
