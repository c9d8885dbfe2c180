"""The gateway's routing for any Ray Serve deployment that serves a language model.

    @serve.deployment(
        num_replicas=4,
        request_router_config=RequestRouterConfig(
            request_router_class="cluster.serve_router.FleetRouter",
            request_router_kwargs={"prefill_tokens_per_s": 8000, "cache_tokens": 400_000},
        ),
    )

It stands on this floor and not beside the policies because it is Ray's class: gateways and the
policies themselves know no Ray. rayfleet's own deployments do not use it: their workers tell what
they hold and how busy they are, while all that Serve tells of a replica is which requests it was
sent and which have ended. The rest is assumed: that prompts are computed at the pace given, and
kept in a cache of the size given, the least recently used evicted first.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from router.config import RoutingConfig
from router.fleet import BlockKey, Choice, Fleet, PromptBlocks
from worker.wire.blocks import TOKEN_BYTES, BlockHashes
from worker.wire.messages import (
    PROTOCOL_VERSION,
    AttachSnapshot,
    BlockEvent,
    BlockRemoved,
    BlockStored,
    EngineInfo,
    LoadSnapshot,
    WorkerUpdate,
)
from worker.wire.step_time import StepCosts

_PAGE_SIZE = 16
_EPOCH = 1
_STEP_S = 0.01


class FleetRouter(RequestRouter):  # type: ignore[misc]  # Ray ships no types
    """Places each call where its prompt's first token is expected soonest, others considered.

    A prompt is the attribute, key or keyword `prompt` or `messages` of the call, or its first
    argument where that is a text. Four bytes of it stand for a token. Calls without one go to the
    replica with the least to do.
    """

    def initialize_state(
        self,
        routing_policy: str = "adaptive",
        prefill_tokens_per_s: float = 10_000.0,
        cache_tokens: int = 500_000,
        max_num_seqs: int = 256,
        **settings: Any,
    ) -> None:
        """Called by Serve with `request_router_kwargs`.

        Args:
            routing_policy: as in `rayfleet serve --routing-policy`.
            prefill_tokens_per_s: pace at which a replica computes prompts.
            cache_tokens: size of a replica's prefix cache.
            max_num_seqs: requests that a replica generates for at once.
            settings: further fields of RoutingConfig.

        Raises:
            ValueError: an unknown policy, or a pace or size that is not positive.
        """
        if prefill_tokens_per_s <= 0 or cache_tokens < _PAGE_SIZE:
            raise ValueError("prefill_tokens_per_s and cache_tokens must be positive")
        config = RoutingConfig(routing_policy=routing_policy, **settings)  # type: ignore[arg-type]
        self._fleet = Fleet(config)
        self._fleet.pace.costs = StepCosts(
            constant=_STEP_S,
            prefill_token=1.0 / prefill_tokens_per_s,
            attended=0.0,
            decode_row=0.0,
            context_token=0.0,
        )
        self._info = EngineInfo(
            model="",
            max_model_len=cache_tokens,
            max_total_tokens=cache_tokens,
            vocab_size=2**31 - 1,
            page_size=_PAGE_SIZE,
            max_num_seqs=max_num_seqs,
            eos_token_ids=[],
            block_hash_salt="",
        )
        self._caches: dict[str, _AssumedCache] = {}
        self._placed: dict[str, _Placed] = {}
        self._open: WeakValueDictionary[str, PendingRequest] = WeakValueDictionary()
        """Requests, by id, that were placed and have not ended."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The best replica; after it, for when it takes no more, all others."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # see cluster/pinning.py
        request_id = pending_request.metadata.internal_request_id
        self._forget(request_id)  # Serve asks again when all replicas were full
        self._open[request_id] = pending_request
        prompt = _prompt_of(pending_request.args, pending_request.kwargs)
        blocks = PromptBlocks(prompt, memo=self._fleet.memo)
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        excluded = [name for name in self._caches if name not in by_id]
        choice = self._fleet.reserve(request_id, blocks, excluded)
        if choice is None:
            return [candidate_replicas]
        loop = asyncio.get_running_loop()
        timer = loop.call_later(choice.first_token_s, self._computed, request_id)
        self._placed[request_id] = _Placed(choice, blocks.hashes(BlockKey.of(self._info)), timer)
        best = by_id.pop(choice.worker_id)
        return [[best], list(by_id.values())]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: Any, result: Any
    ) -> None:
        """A replica has taken the request.

        HAZARD: a short one may have ended before Serve tells this; it runs no more.
        """
        super().on_request_routed(pending_request, replica_id, result)
        request_id = pending_request.metadata.internal_request_id
        cache = self._caches.get(replica_id.unique_id)
        if cache is None or request_id not in self._open:
            return
        cache.running.add(request_id)
        placed = self._placed.get(request_id)
        if placed is not None and placed.choice.worker_id != replica_id.unique_id:
            self._forget(request_id)  # the one that was chosen took no more
            self._tell(replica_id.unique_id, cache.take(placed.hashes))

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        """A request has ended in whatever way, or a replica has refused it."""
        super().on_request_completed(replica_id, internal_request_id)
        self._computed(internal_request_id)
        self._open.pop(internal_request_id, None)
        cache = self._caches.get(replica_id.unique_id)
        if cache is not None:
            cache.running.discard(internal_request_id)
            self._tell(replica_id.unique_id, [])

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve's news of the running replicas."""
        super().update_replicas(replicas)
        self._members_changed()

    def on_replica_actor_died(self, replica_id: Any) -> None:
        """Serve found a replica dead before its controller did."""
        super().on_replica_actor_died(replica_id)
        self._members_changed()

    def _members_changed(self) -> None:
        present = {replica_id.unique_id for replica_id in self.curr_replicas}
        for name in [name for name in self._caches if name not in present]:
            del self._caches[name]
            self._fleet.remove(name)
        for name in sorted(present - self._caches.keys()):
            cache = self._caches[name] = _AssumedCache(self._info)
            snapshot = AttachSnapshot(PROTOCOL_VERSION, name, _EPOCH, self._info, [], cache.load())
            self._fleet.attach(name, snapshot)

    def _computed(self, request_id: str) -> None:
        """Notes a prompt as computed: by now it should be in the replica's cache."""
        placed = self._placed.get(request_id)
        if placed is None:
            return
        self._forget(request_id)
        cache = self._caches.get(placed.choice.worker_id)
        if cache is not None:
            self._tell(placed.choice.worker_id, cache.take(placed.hashes))

    def _forget(self, request_id: str) -> None:
        placed = self._placed.pop(request_id, None)
        if placed is not None:
            placed.timer.cancel()
            self._fleet.release(placed.choice.worker_id, request_id)

    def _tell(self, worker_id: str, events: list[BlockEvent]) -> None:
        load = self._caches[worker_id].load()
        self._fleet.update(worker_id, WorkerUpdate(_EPOCH, 0, [], events, load))


class _Placed:
    """A request that was placed and is not taken to be computed yet."""

    def __init__(self, choice: Choice, hashes: BlockHashes, timer: asyncio.TimerHandle) -> None:
        self.choice = choice
        self.hashes = hashes
        self.timer = timer


class _AssumedCache:
    """A replica's prefix cache, as far as it should hold what it was sent."""

    def __init__(self, info: EngineInfo) -> None:
        self.running: set[str] = set()
        """Requests, by id."""
        self._max_num_seqs = info.max_num_seqs
        self._num_pages = info.max_total_tokens // info.page_size
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def load(self) -> LoadSnapshot:
        """The load as a worker would report it."""
        return LoadSnapshot(
            num_running=len(self.running),
            num_free_pages=self._num_pages,
            num_total_pages=self._num_pages,
            max_num_seqs=self._max_num_seqs,
        )

    def take(self, hashes: BlockHashes) -> list[BlockEvent]:
        """A prompt was computed; what changes with it."""
        values = hashes.tolist()
        events: list[BlockEvent] = []
        if any(value not in self._blocks for value in values):
            events.append(BlockStored(values, None))
        for value in reversed(values):  # leaves are evicted before what they follow
            self._blocks[value] = None
            self._blocks.move_to_end(value)
        num_over = max(len(self._blocks) - self._num_pages, 0)
        evicted = [self._blocks.popitem(last=False)[0] for _ in range(num_over)]
        if evicted:
            events.append(BlockRemoved(evicted))
        return events


def _prompt_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """The text of a call as little-endian int32; empty where there is none."""
    for source in (kwargs, *args):
        for name in ("messages", "prompt"):
            value = source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)
            if value is not None:
                return _packed(_text_of(value))
    return _packed(args[0]) if args and isinstance(args[0], str) else b""


def _text_of(value: Any) -> str:
    """Texts of nested messages and parts, in their order."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        parts = (value.get(name) for name in ("role", "content", "text"))
        return "\n".join(_text_of(part) for part in parts if part is not None)
    if isinstance(value, Sequence):
        return "\n".join(_text_of(part) for part in value)
    parts = (getattr(value, name, None) for name in ("role", "content", "text"))
    return "\n".join(_text_of(part) for part in parts if part is not None)


def _packed(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return data[: len(data) // TOKEN_BYTES * TOKEN_BYTES]
