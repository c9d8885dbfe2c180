"""What a front keeps for its gateways: the cache as it stands, and each one's untold news."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from worker.wire.messages import (
    AttachSnapshot,
    BlockEvent,
    BlockRemoved,
    BlockStored,
    LoadSnapshot,
    TokenDelta,
    WorkerDown,
    WorkerItem,
    WorkerUpdate,
)


class CacheMirror:
    """Block hashes in the engine's prefix cache, for gateways that attach later."""

    def __init__(self) -> None:
        self._parents: dict[int, int | None] = {}
        """Hash to its parent's. The engine evicts leaves first, so parents come before children."""

    def apply(self, events: Iterable[BlockEvent]) -> None:
        """Follows one step of the engine's cache."""
        for event in events:
            if isinstance(event, BlockRemoved):
                for block_hash in event.block_hashes:
                    self._parents.pop(block_hash, None)
                continue
            parent = event.parent_hash
            for block_hash in event.block_hashes:
                self._parents[block_hash] = parent
                parent = block_hash

    def chains(self) -> list[BlockStored]:
        """All blocks, parents first, neighbours in a chain joined into one event."""
        chains: list[BlockStored] = []
        last: int | None = None
        for block_hash, parent in self._parents.items():
            if chains and parent == last:
                chains[-1].block_hashes.append(block_hash)
            else:
                chains.append(BlockStored(block_hashes=[block_hash], parent_hash=parent))
            last = block_hash
        return chains


class Attachment:
    """What one gateway has yet to be told, and which of its requests are open."""

    def __init__(self) -> None:
        self.open_requests: dict[str, int] = {}
        """Request id to attempt."""
        self._pending: list[WorkerItem] = []
        self._tails: dict[tuple[str, int], TokenDelta] = {}
        """Deltas of the pending update, where the next tokens of a request are added."""
        self._news = asyncio.Event()
        self._ended = False
        self._seq = 0

    def put(self, item: AttachSnapshot | WorkerDown) -> None:
        """Adds an item that stands alone."""
        self._pending.append(item)
        self._tails.clear()
        self._news.set()

    def put_step(
        self,
        epoch: int,
        deltas: list[TokenDelta],
        block_events: list[BlockEvent],
        load: LoadSnapshot,
    ) -> None:
        """Adds one step; merges it with the last one if that has not been taken yet."""
        update = self._pending[-1] if self._pending else None
        if isinstance(update, WorkerUpdate):
            update.block_events.extend(block_events)
            update.load = load
        else:
            # A copy: other gateways are told the same events.
            events = list(block_events)
            update = WorkerUpdate(epoch=epoch, seq=0, deltas=[], block_events=events, load=load)
            self._pending.append(update)
        for delta in deltas:
            self._merge(update, delta)
            if delta.finish_reason is not None:
                self._close_request(delta)
        self._news.set()

    async def next(self) -> WorkerItem | None:
        """The oldest pending item, waiting for one; None when the stream has ended."""
        while not self._pending:
            if self._ended:
                return None
            self._news.clear()
            await self._news.wait()
        item = self._pending.pop(0)
        if not self._pending:
            self._tails.clear()
        if isinstance(item, WorkerUpdate):
            self._seq += 1
            item.seq = self._seq
        return item

    @property
    def num_pending_events(self) -> int:
        """Block events in the update that has not been taken yet."""
        update = self._pending[-1] if self._pending else None
        return len(update.block_events) if isinstance(update, WorkerUpdate) else 0

    def end(self) -> None:
        """No more items will come."""
        self._ended = True
        self._news.set()

    def drop(self) -> None:
        """Ends at once: what is pending will not be taken either."""
        self._pending.clear()
        self._tails.clear()
        self.end()

    def _close_request(self, delta: TokenDelta) -> None:
        # The end of an earlier attempt may follow the submit of a later one.
        if self.open_requests.get(delta.request_id) == delta.attempt:
            del self.open_requests[delta.request_id]

    def _merge(self, update: WorkerUpdate, delta: TokenDelta) -> None:
        key = (delta.request_id, delta.attempt)
        tail = self._tails.get(key)
        if tail is None:
            self._tails[key] = delta
            update.deltas.append(delta)
            return
        tail.token_ids.extend(delta.token_ids)
        tail.finish_reason = delta.finish_reason
        tail.stop_reason = delta.stop_reason
        tail.error = delta.error
        if delta.num_cached_tokens >= 0:
            tail.num_cached_tokens = delta.num_cached_tokens
