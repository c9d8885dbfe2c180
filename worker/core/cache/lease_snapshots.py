"""Positions at which the state of a running request is stored, and the snapshots in progress."""

from __future__ import annotations

from worker.core.cache.fence import CompletedSteps
from worker.core.cache.lease import Lease
from worker.core.cache.radix import RadixTree
from worker.core.cache.snapshots import PendingSnapshot, SnapshotPool


class LeaseSnapshots:
    """Snapshots of the states of leases, from the step that stores them until they are attached to
    cached pages.

    Without drafts, a row stores the state at positions within it. A draft row leaves the state at
    its first position, since drafts may be rejected; the next row first advances it by the accepted
    drafts. When the scheduler plans that row, it does not know how many drafts were accepted. It
    therefore plans a snapshot at a position that the state may or may not reach, and only learns
    from the step's result whether the snapshot was stored.

    Args:
        pool: all snapshots.
        page_size: tokens per page.
        stride: distance between positions whose snapshots are kept, a multiple of the page size.
        steps: the completed steps.
    """

    def __init__(
        self, pool: SnapshotPool, page_size: int, stride: int, steps: CompletedSteps
    ) -> None:
        self._pool = pool
        self._steps = steps
        self._page_size = page_size
        self._stride = stride

    def take(
        self, lease: Lease, start: int, end: int, *, of_drafts: bool = False
    ) -> list[PendingSnapshot]:
        """Takes snapshots for the step `lease.fence`, which computes positions [start, end) of a
        lease and stores its state at some of them.

        Snapshots at the lease's borders are kept, as are those at regular distances, which bound
        the recomputation after any prefix. The snapshot of the last full page is replaced by the
        next one.

        Args:
            start: first position; for a draft row, the minimum position of its newest token.
            end: end of the positions; for a draft row, the maximum position of its newest token.
            of_drafts: whether it is a draft row. Such a row can only store the state that it starts
                from, not states within it.
        """
        first = max(lease.state_start, lease.state_end)
        lease.state_start = start if of_drafts else end
        if lease.node is None:
            return []
        size, stride = self._page_size, self._stride
        kept = {*range(first - first % stride + stride, end + 1, stride), *lease.borders}
        positions: list[int] = []
        if not of_drafts:
            within = {end - end % size, *kept}
            positions = sorted((p for p in within if start < p <= end), reverse=True)
        if (last := end if of_drafts else start) > first:
            # The earliest position that no step in flight stores; later steps can store the others.
            stored = {pending.position for pending in lease.snapshots if pending.position < start}
            passed = {p for p in kept if first < p <= last} or {first - first % size + size}
            positions += sorted(p for p in passed - stored if p <= last)[:1]
        pending = [
            PendingSnapshot(position, snapshot, position in kept, lease.fence)
            for position in positions
            if (snapshot := self._pool.take()) is not None
        ]
        lease.snapshots += pending
        return pending

    def end(self, lease: Lease, seq: int, stored_to: int, state_end: int) -> None:
        """Frees the snapshots that a completed step was planned to store but did not.

        Args:
            lease: the lease of a row of the step.
            seq: number of the step.
            stored_to: lower bound of the position up to which the step has stored snapshots.
            state_end: upper bound of the state's position after the step.
        """
        first, lease.state_end = lease.state_end, max(state_end, lease.state_end)
        if not lease.snapshots:
            return
        missed = [
            pending
            for pending in lease.snapshots
            if pending.seq == seq and not first < pending.position <= stored_to
        ]
        if missed:
            self._pool.release([pending.snapshot for pending in missed], 0)
            lease.snapshots = [one for one in lease.snapshots if one not in missed]

    def attach(self, lease: Lease, tree: RadixTree) -> None:
        """Attaches the snapshots that completed steps have stored to the cached pages at whose ends
        they were taken. The lease's latest snapshot replaces its previous one unless the previous
        one is to be kept."""
        assert lease.node is not None, "its pages are not cached"
        num_pages, size = lease.num_cached_pages, self._page_size
        due = [
            pending
            for pending in lease.snapshots
            if pending.position <= num_pages * size and pending.seq <= self._steps.last
        ]
        if not due:
            return
        lease.snapshots = [pending for pending in lease.snapshots if pending not in due]
        first = min(pending.position for pending in due) // size - 1
        pages = tree.last_pages(lease.node, num_pages - first)
        self._pool.drop_rolling(lease.rolling_page)
        lease.rolling_page = 0
        for pending in due:
            page = pages[pending.position // size - 1 - first]
            if self._pool.attach(page, pending) and not pending.is_kept:
                lease.rolling_page = page
