"""What a frontend keeps for its gateways: the cache as it stands, and what each one is yet to be
sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from worker.wire.messages import (
    AttachSnapshot,
    BlockEvent,
    BlockRemoved,
    BlockStored,
    LoadSnapshot,
    Tier,
    TokenDelta,
    WorkerDown,
    WorkerItem,
    WorkerUpdate,
)


class CacheMirror:
    """Block hashes in the engine's prefix cache, for gateways that attach later."""

    def __init__(self) -> None:
        self._tiers: dict[Tier, dict[int, int | None]] = {"device": {}, "host": {}}
        """Hash to its parent's. The engine evicts leaves first, so parents come before children on
        the device, and after them on the host."""

    def apply(self, events: Iterable[BlockEvent]) -> None:
        """Follows one step of the engine's cache."""
        for event in events:
            parents = self._tiers[event.tier]
            if isinstance(event, BlockRemoved):
                for block_hash in event.block_hashes:
                    parents.pop(block_hash, None)
                continue
            parent = event.parent_hash
            for block_hash in event.block_hashes:
                parents[block_hash] = parent
                parent = block_hash

    def chains(self) -> list[BlockStored]:
        """All blocks, those on the device parents first, neighbours in a chain joined."""
        chains: list[BlockStored] = []
        for tier, parents in self._tiers.items():
            last: int | None = None
            for block_hash, parent in parents.items():
                if last is not None and parent == last:
                    chains[-1].block_hashes.append(block_hash)
                else:
                    chains.append(BlockStored([block_hash], parent, tier))
                last = block_hash
        return chains


class Attachment:
    """What one gateway is yet to be sent, and which of its requests are open.

    Args:
        on_item: called whenever there is something to take, or the stream has ended; without it,
            `next` waits for that.
    """

    def __init__(self, on_item: Callable[[], None] | None = None) -> None:
        self.open_requests: dict[str, int] = {}
        """Request id to attempt."""
        self.ended = False
        """No more items will come than those that are pending."""
        self._pending: list[WorkerItem] = []
        self._tails: dict[tuple[str, int], TokenDelta] | None = None
        """Deltas of the pending update, where the next tokens of a request are added; None until
        a second step has to be merged into it."""
        self._has_items = asyncio.Event()
        self._on_item = on_item or self._has_items.set
        self._seq = 0

    def put(self, item: AttachSnapshot | WorkerDown) -> None:
        """Adds an item that stands alone."""
        self._pending.append(item)
        self._tails = None
        self._on_item()

    def put_step(
        self,
        epoch: int,
        deltas: list[TokenDelta],
        block_events: list[BlockEvent],
        load: LoadSnapshot,
    ) -> None:
        """Adds one step; merges it with the last one if that has not been taken yet.

        `deltas` belong to this gateway alone, and to this object from now on.
        """
        update = self._pending[-1] if self._pending else None
        if isinstance(update, WorkerUpdate):
            update.block_events.extend(block_events)
            update.load = load
            self._merge(update, deltas)
        else:
            # A copy: other gateways get the same events.
            events = list(block_events)
            self._tails = None
            self._pending.append(
                WorkerUpdate(epoch=epoch, seq=0, deltas=deltas, block_events=events, load=load)
            )
        for delta in deltas:
            if delta.finish_reason is not None:
                self._close_request(delta)
        self._on_item()

    def take(self) -> WorkerItem | None:
        """The oldest pending item, None where there is none."""
        if not self._pending:
            return None
        item = self._pending.pop(0)
        if isinstance(item, WorkerUpdate):
            self._seq += 1
            item.seq = self._seq
        return item

    async def next(self) -> WorkerItem | None:
        """The oldest pending item, waiting for one; None when the stream has ended."""
        while (item := self.take()) is None and not self.ended:
            self._has_items.clear()
            await self._has_items.wait()
        return item

    @property
    def num_pending_events(self) -> int:
        """Block events in the update that has not been taken yet."""
        update = self._pending[-1] if self._pending else None
        return len(update.block_events) if isinstance(update, WorkerUpdate) else 0

    def end(self) -> None:
        """No more items will come."""
        self.ended = True
        self._on_item()

    def drop(self) -> None:
        """Ends at once: what is pending will not be taken either."""
        self._pending.clear()
        self.end()

    def _close_request(self, delta: TokenDelta) -> None:
        # The end of an earlier attempt may follow the submit of a later one.
        if self.open_requests.get(delta.request_id) == delta.attempt:
            del self.open_requests[delta.request_id]

    def _merge(self, update: WorkerUpdate, deltas: list[TokenDelta]) -> None:
        tails = self._tails
        if tails is None:
            tails = self._tails = {(d.request_id, d.attempt): d for d in update.deltas}
        for delta in deltas:
            key = (delta.request_id, delta.attempt)
            tail = tails.get(key)
            if tail is None:
                tails[key] = delta
                update.deltas.append(delta)
            else:
                _extend(tail, delta)


def _extend(tail: TokenDelta, delta: TokenDelta) -> None:
    """Adds what a later step did for the same request."""
    tail.token_ids.extend(delta.token_ids)
    tail.finish_reason = delta.finish_reason
    tail.stop_reason = delta.stop_reason
    tail.error = delta.error
    tail.ended_by_grammar = delta.ended_by_grammar
    tail.rejection = delta.rejection
    tail.num_rounds, tail.num_forwards = delta.num_rounds, delta.num_forwards
    if delta.num_cached_tokens >= 0:
        tail.num_cached_tokens = delta.num_cached_tokens
    if delta.logprobs is not None:
        tail.logprobs = [*(tail.logprobs or ()), *delta.logprobs]
    if delta.times is not None:
        tail.times = delta.times
    if delta.prompt_logprobs is not None:
        tail.prompt_logprobs = delta.prompt_logprobs
