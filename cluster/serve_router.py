"""Request router with the gateway's routing policies, for any Serve deployment of an LLM.

    @serve.deployment(
        num_replicas=4,
        request_router_config=RequestRouterConfig(
            request_router_class="cluster.serve_router.FleetRouter",
            request_router_kwargs={"prefill_tokens_per_s": 8000, "cache_tokens": 400_000},
        ),
    )

This module is in `cluster` because it subclasses a Ray class, which gateways and policies do not
import. rayfleet's deployments do not use it: their workers report cached blocks and load, while
Serve only records which requests were sent to a replica and which have finished. The rest is
assumed: replicas compute prompts at the given rate, and keep them in an LRU prefix cache of the
given size.
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
from worker.protocol.blocks import TOKEN_BYTES, BlockHashes
from worker.protocol.messages import (
    PROTOCOL_VERSION,
    AttachSnapshot,
    BlockEvent,
    BlockRemoved,
    BlockStored,
    EngineInfo,
    LoadSnapshot,
    WorkerUpdate,
)
from worker.protocol.options import from_options
from worker.protocol.step_time import StepCosts

_PAGE_SIZE = 16
"""Tokens per block of the assumed prefix caches."""
_EPOCH = 1
_STEP_S = 0.01
"""Constant part of the assumed step time, in seconds."""


class FleetRouter(RequestRouter):  # type: ignore[misc]  # Ray ships no types
    """Router that places each call according to one of the gateway's policies, such as the adaptive
    one.

    The prompt is the attribute, key or keyword `prompt` or `messages` of the call, or its first
    argument if that is a string. Four bytes count as one token. A call without a prompt is placed
    by load only.
    """

    def initialize_state(
        self,
        routing_policy: str = "adaptive",
        prefill_tokens_per_s: float = 10_000.0,
        cache_tokens: int = 500_000,
        max_num_seqs: int = 256,
        **settings: Any,
    ) -> None:
        """Initializes the router; called by Serve with `request_router_kwargs`.

        Args:
            routing_policy: as in `rayfleet serve --routing-policy`.
            prefill_tokens_per_s: prompt tokens that a replica computes per second.
            cache_tokens: tokens that a replica's prefix cache holds.
            max_num_seqs: maximum number of running requests of a replica.
            settings: other options of RoutingConfig.

        Raises:
            ValueError: the policy is unknown, the rate is not greater than 0, or the cache is
                smaller than a page.
        """
        if prefill_tokens_per_s <= 0 or cache_tokens < _PAGE_SIZE:
            raise ValueError(
                "prefill_tokens_per_s must be greater than 0 and cache_tokens at least "
                f"{_PAGE_SIZE} (one page), got {prefill_tokens_per_s} and {cache_tokens}"
            )
        config = from_options(RoutingConfig, {"routing_policy": routing_policy, **settings})
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
        """Requests that were placed and have not finished, by ID."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The replica chosen by the policy; all others are fallbacks in case it is full."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # see cluster/pinning.py
        request_id = pending_request.metadata.internal_request_id
        self._forget(request_id)  # Serve calls this again after all replicas were full
        self._open[request_id] = pending_request
        prompt = _prompt_of(pending_request.args, pending_request.kwargs)
        blocks = PromptBlocks(prompt, memo=self._fleet.memo)
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        excluded = [name for name in self._caches if name not in by_id]
        choice = self._fleet.reserve(request_id, blocks, excluded)
        if choice is None:
            return [candidate_replicas]
        loop = asyncio.get_running_loop()
        timer = loop.call_later(choice.first_token_s, self._prompt_computed, request_id)
        self._placed[request_id] = _Placed(choice, blocks.hashes(BlockKey.of(self._info)), timer)
        best = by_id.pop(choice.worker_id)
        return [[best], list(by_id.values())]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: Any, result: Any
    ) -> None:
        """Counts a request as running; Serve calls this when a replica has accepted it.

        HAZARD: a short request may already have finished, and must then not count as running.
        """
        super().on_request_routed(pending_request, replica_id, result)
        request_id = pending_request.metadata.internal_request_id
        cache = self._caches.get(replica_id.unique_id)
        if cache is None or request_id not in self._open:
            return
        cache.running.add(request_id)
        placed = self._placed.get(request_id)
        if placed is not None and placed.choice.worker_id != replica_id.unique_id:
            self._forget(request_id)  # the chosen replica was full
            self._update(replica_id.unique_id, cache.store(placed.hashes))

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        """Removes a request from the running ones; Serve calls this when a request has finished,
        failed, or been rejected by a replica."""
        super().on_request_completed(replica_id, internal_request_id)
        self._prompt_computed(internal_request_id)
        self._open.pop(internal_request_id, None)
        cache = self._caches.get(replica_id.unique_id)
        if cache is not None:
            cache.running.discard(internal_request_id)
            self._update(replica_id.unique_id, [])

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Adds and removes replicas; Serve calls this with the running replicas if they change."""
        super().update_replicas(replicas)
        self._replicas_changed()

    def on_replica_actor_died(self, replica_id: Any) -> None:
        """Removes a dead replica; Serve calls this if a call detects the failure before the
        controller does."""
        super().on_replica_actor_died(replica_id)
        self._replicas_changed()

    def _replicas_changed(self) -> None:
        present = {replica_id.unique_id for replica_id in self.curr_replicas}
        for name in [name for name in self._caches if name not in present]:
            del self._caches[name]
            self._fleet.remove(name)
        for name in sorted(present - self._caches.keys()):
            cache = self._caches[name] = _AssumedCache(self._info)
            snapshot = AttachSnapshot(PROTOCOL_VERSION, name, _EPOCH, self._info, [], cache.load())
            self._fleet.attach(name, snapshot)

    def _prompt_computed(self, request_id: str) -> None:
        """Releases a request's reservation and adds its prompt to the replica's assumed cache."""
        placed = self._placed.get(request_id)
        if placed is None:
            return
        self._forget(request_id)
        cache = self._caches.get(placed.choice.worker_id)
        if cache is not None:
            self._update(placed.choice.worker_id, cache.store(placed.hashes))

    def _forget(self, request_id: str) -> None:
        placed = self._placed.pop(request_id, None)
        if placed is not None:
            placed.timer.cancel()
            self._fleet.release_booking(placed.choice.worker_id, request_id)

    def _update(self, worker_id: str, events: list[BlockEvent]) -> None:
        load = self._caches[worker_id].load()
        self._fleet.update(worker_id, WorkerUpdate(_EPOCH, 0, [], events, load))


class _Placed:
    """A placed request whose prefill is expected to be still running."""

    def __init__(self, choice: Choice, hashes: BlockHashes, timer: asyncio.TimerHandle) -> None:
        self.choice = choice
        self.hashes = hashes
        self.timer = timer


class _AssumedCache:
    """Expected state of a replica (prefix cache and running requests), based on the requests sent
    to it."""

    def __init__(self, info: EngineInfo) -> None:
        self.running: set[str] = set()
        """IDs of the running requests."""
        self._max_num_seqs = info.max_num_seqs
        self._num_pages = info.max_total_tokens // info.page_size
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def load(self) -> LoadSnapshot:
        """Load, as a worker would report it."""
        return LoadSnapshot(
            num_running=len(self.running),
            num_free_pages=self._num_pages,
            num_total_pages=self._num_pages,
            max_num_seqs=self._max_num_seqs,
        )

    def store(self, hashes: BlockHashes) -> list[BlockEvent]:
        """Stores the blocks of a computed prompt; returns the events that a worker would send."""
        values = hashes.tolist()
        events: list[BlockEvent] = []
        if any(value not in self._blocks for value in values):
            events.append(BlockStored(values, None))
        for value in reversed(values):  # a block is evicted before its predecessors
            self._blocks[value] = None
            self._blocks.move_to_end(value)
        num_over = max(len(self._blocks) - self._num_pages, 0)
        evicted = [self._blocks.popitem(last=False)[0] for _ in range(num_over)]
        if evicted:
            events.append(BlockRemoved(evicted))
        return events


def _prompt_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Prompt of a call as token IDs: its UTF-8 as little-endian int32; empty if there is none."""
    for source in (kwargs, *args):
        for name in ("messages", "prompt"):
            value = source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)
            if value is not None:
                return _packed(_text_of(value))
    return _packed(args[0]) if args and isinstance(args[0], str) else b""


def _text_of(value: Any) -> str:
    """Texts of nested messages and content parts in order, one per line."""
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
