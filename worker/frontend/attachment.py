"""Frontend state per gateway: pending items, and a mirror of the prefix cache for new gateways."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from worker.protocol.messages import (
    AttachSnapshot,
    BlockEvent,
    BlockRemoved,
    BlockStored,
    LoadSnapshot,
    PromptInFlight,
    Tier,
    TokenDelta,
    WorkerDown,
    WorkerItem,
    WorkerUpdate,
)


class CacheMirror:
    """Mirror of the engine's prefix cache, as block hashes, for gateways that attach later."""

    def __init__(self) -> None:
        self._tiers: dict[Tier, dict[int, int | None]] = {"device": {}, "host": {}}
        """Parent hash by block hash, for each tier. On the device, parents precede their children;
        on the host, children precede their parents, since the engine evicts leaves first."""

    def apply(self, events: Iterable[BlockEvent]) -> None:
        """Applies the block events of one step."""
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
        """All blocks, joined into runs of consecutive blocks. On the device, parents come first."""
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
    """Attach stream of one gateway: pending items and open requests.

    Args:
        on_item: called when an item is available or the stream has ended; None if the caller uses
            `next` instead.
    """

    def __init__(self, on_item: Callable[[], None] | None = None) -> None:
        self.open_requests: dict[str, int] = {}
        """Attempt of each open request, by request id."""
        self.ended = False
        """Whether no further items will be added."""
        self._pending: list[WorkerItem] = []
        self._tails: dict[tuple[str, int], TokenDelta] | None = None
        """Deltas of the pending update by (request id, attempt), into which later deltas are
        merged; None until a second step is merged."""
        self._has_items = asyncio.Event()
        self._on_item = on_item or self._has_items.set
        self._seq = 0
        self._events: list[BlockEvent] = []
        """Block events that are not yet in an item."""
        self._computed: list[int] = []
        """Ordinals of computed prompts that are not yet in an item."""

    def put(self, item: AttachSnapshot | WorkerDown) -> None:
        """Adds an item that is never merged."""
        self._events.clear()  # a snapshot includes them; after a failure there are no blocks
        self._computed.clear()
        self._pending.append(item)
        self._tails = None
        self._on_item()

    def put_step(
        self,
        epoch: int,
        deltas: list[TokenDelta],
        block_events: list[BlockEvent],
        load: LoadSnapshot,
        computed: Sequence[int] = (),
    ) -> None:
        """Adds one step. Tokens are sent immediately. Load and blocks, which take a gateway as long
        to process as several tokens, wait for the next heartbeat unless they are needed earlier.

        `deltas` must only contain deltas for this gateway, and this object takes ownership of them.
        For the other arguments, see WorkerUpdate.
        """
        self._events.extend(block_events)
        self._computed.extend(computed)
        if _need_report(deltas):
            self._put_update(epoch, deltas, load)
        elif deltas:
            self._put_update(epoch, deltas, None)
        for delta in deltas:
            if delta.finish_reason is not None:
                self._close_request(delta)

    def put_prompts(
        self, epoch: int, prompts: Sequence[PromptInFlight], load: LoadSnapshot
    ) -> None:
        """Adds prompts that other gateways have just sent, and the load that includes them."""
        self._put_update(epoch, [], load, prompts)

    def beat(self, epoch: int, load: LoadSnapshot, computed: Sequence[int] = ()) -> None:
        """Adds a heartbeat, with the load and blocks that have been waiting for it."""
        self._computed.extend(computed)
        self._put_update(epoch, [], load)

    def take_item(self) -> WorkerItem | None:
        """Removes and returns the oldest pending item; None if there is none."""
        if not self._pending:
            return None
        item = self._pending.pop(0)
        if isinstance(item, WorkerUpdate):
            self._seq += 1
            item.seq = self._seq
        return item

    async def next(self) -> WorkerItem | None:
        """Waits for an item and returns the oldest; None when the stream has ended."""
        while (item := self.take_item()) is None and not self.ended:
            self._has_items.clear()
            await self._has_items.wait()
        return item

    @property
    def num_pending_events(self) -> int:
        """Number of block events in the pending update, plus those that are not in an item yet."""
        update = self._pending[-1] if self._pending else None
        pending = len(update.block_events) if isinstance(update, WorkerUpdate) else 0
        return pending + len(self._events)

    def end_stream(self) -> None:
        """Ends the stream after the pending items."""
        self.ended = True
        self._on_item()

    def drop_stream(self) -> None:
        """Ends the stream immediately, dropping pending items."""
        self._pending.clear()
        self.end_stream()

    def _put_update(
        self,
        epoch: int,
        deltas: list[TokenDelta],
        load: LoadSnapshot | None,
        prompts: Sequence[PromptInFlight] = (),
    ) -> None:
        """Adds an update, which is merged into the last one if that is still pending. An update
        with a load also includes all waiting block events and computed prompts."""
        events: list[BlockEvent] = []
        computed: list[int] = []
        if load is not None:
            events, self._events = self._events, []
            computed, self._computed = self._computed, []
        update = self._pending[-1] if self._pending else None
        if isinstance(update, WorkerUpdate):
            update.block_events.extend(events)
            update.load = load or update.load
            # Prompts that the gateway has not received are dropped: it may have stopped reading.
            ended = frozenset(computed)
            update.prompts = [p for p in update.prompts if p.ordinal not in ended]
            update.prompts.extend(prompts)
            update.computed.extend(computed)
            self._merge(update, deltas)
        else:
            self._tails = None
            self._pending.append(
                WorkerUpdate(epoch, 0, deltas, events, load, list(prompts), computed)
            )
        self._on_item()

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


def _need_report(deltas: Iterable[TokenDelta]) -> bool:
    """Whether the gateway needs the blocks of a step immediately. It does if a prompt was computed,
    since its blocks were only predicted until then, or if a request has ended, since the next
    request may continue it."""
    return any(d.num_cached_tokens >= 0 or d.finish_reason is not None for d in deltas)


def _extend(tail: TokenDelta, delta: TokenDelta) -> None:
    """Merges a later delta of the same request and attempt into `tail`."""
    tail.token_ids.extend(delta.token_ids)
    tail.finish_reason = delta.finish_reason
    tail.stop_reason = delta.stop_reason
    tail.error = delta.error
    tail.ended_by_grammar = delta.ended_by_grammar
    tail.rejection = delta.rejection
    tail.num_rounds, tail.num_forwards = delta.num_rounds, delta.num_forwards
    tail.draft = delta.draft
    if delta.num_cached_tokens >= 0:
        tail.num_cached_tokens = delta.num_cached_tokens
    if delta.logprobs is not None:
        tail.logprobs = [*(tail.logprobs or ()), *delta.logprobs]
    if delta.times is not None:
        tail.times = delta.times
    if delta.pooled is not None:
        tail.pooled = delta.pooled
    if delta.prompt_logprobs is not None:
        if tail.prompt_logprobs is None:
            tail.prompt_logprobs = delta.prompt_logprobs
        else:
            tail.prompt_logprobs.extend(delta.prompt_logprobs)
