"""Sessions: the contexts of agent sessions, identified by their ids and their prompts.

A session has one context per growing conversation: its own, and those of its sub-agents, which send
the same id. Without an id, a prompt that extends the prompt of an earlier request continues the
session of that request.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

import numpy as np
from xxhash import xxh3_64_intdigest

from router.fleet.session_gaps import GapHistogram
from router.fleet.workers import grown
from worker.protocol.blocks import BlockHashes
from worker.protocol.working_sets import SessionUse

MAX_CONTEXTS = 4096
"""Maximum number of contexts kept; those used least recently are dropped."""
MAX_SUB_AGENTS = 32
"""Maximum number of contexts with the same id that share the age of the first one. Further contexts
have their own age, since an application may send the same `prompt_cache_key` for all of its users.
"""
_NAMED_BLOCKS = 64
"""Number of leading blocks of the first prompt that, together with the session id, determine a
context's key. Contexts with the same id differ in these blocks, and all gateways compute the same
key."""
_OPEN_BLOCKS = 1
"""Number of full blocks at the end of a prompt that the next prompt need not repeat: they may
contain the start of the answer, which chat templates may write differently as history."""
_NEVER = np.iinfo(np.int64).max


class Session:
    """All contexts with the same id. Times are on the fleet's clock."""

    __slots__ = ("born", "contexts", "gaps", "name")

    def __init__(self, name: str, born: float) -> None:
        self.name = name
        """The client's session id; empty if it sent none."""
        self.born = born
        self.contexts: dict[int, Context] = {}
        self.gaps = GapHistogram()


class Context:
    """A growing conversation. Times are on the fleet's clock."""

    __slots__ = (
        "admitted_at",
        "born",
        "counts",
        "ended_at",
        "has_returned",
        "home",
        "is_agent",
        "is_displaced",
        "key",
        "live_until",
        "num_open",
        "num_tokens",
        "num_turns",
        "session",
        "shared_key",
        "shared_tokens",
        "slot",
        "tail",
        "tail_block",
    )

    def __init__(self, key: int, session: Session, born: float) -> None:
        self.born = born
        """Time from which the context's age is counted."""
        self.admitted_at = born
        """Time at which a request of the context was last admitted after a wait."""
        self.key = key
        """Id of the context; see SessionUse."""
        self.session = session
        self.counts = False
        """Whether the gate counts the context: it is long, and has had a second request or is
        expected to."""
        self.is_agent = False
        """Whether the first prompt was long, and had tools or a session id."""
        self.has_returned = False
        """Whether another request arrived after the end of the first one."""
        self.is_displaced = False
        """Whether an overdue request displaced the context, which is no longer live once its
        requests in flight end.
        """
        self.home = ""
        """Worker of the last request; empty before the first."""
        self.num_open = 0
        """Number of requests on workers."""
        self.num_turns = 0
        """Number of requests that were placed."""
        self.ended_at = 0.0
        """Time at which a request last ended; 0 before the first."""
        self.live_until = 0.0
        """Time until which the context counts as live without a request in flight."""
        self.num_tokens = 0
        """Tokens of the last prompt."""
        self.shared_key = 0
        """Hash of the last block that was already cached at the first request; 0 if there was none.
        """
        self.shared_tokens = 0
        """Number of prompt tokens that were already cached at the first request."""
        self.tail = 0
        """Hash of a block near the end of the last prompt; prompts that extend the last prompt
        contain it."""
        self.tail_block = -1
        """Index of the block with hash `tail`; -1 if there is none."""
        self.slot = -1
        """Index of the context in `_Tails`; -1 if it is not there."""

    def is_live(self, now: float) -> bool:
        """Whether the context has requests in flight, or its last request ended recently."""
        return self.num_open > 0 or now < self.live_until

    def use(self, live_s: float = 0.0, displaced: tuple[int, ...] = ()) -> SessionUse:
        """The context's use of the worker's cache; see SessionUse for the arguments."""
        unshared = max(self.num_tokens - self.shared_tokens, 0)
        return SessionUse(
            self.key, unshared, self.shared_key, self.shared_tokens, live_s, displaced
        )


class Sessions:
    """Contexts by session id and by prompt, up to a maximum number.

    Args:
        max_contexts: maximum number of contexts, above which only contexts without requests in
            flight are dropped.
    """

    def __init__(self, max_contexts: int = MAX_CONTEXTS) -> None:
        self.gaps = GapHistogram()
        """Histogram of the gaps of all sessions."""
        self._max_contexts = max_contexts
        self._named: dict[str, Session] = {}
        self._contexts: OrderedDict[int, Context] = OrderedDict()
        """Contexts by key, the least recently used first."""
        self._tails = _Tails()

    def __len__(self) -> int:
        """Number of contexts."""
        return len(self._contexts)

    def __iter__(self) -> Iterator[Context]:
        """All contexts, the least recently used first."""
        return iter(self._contexts.values())

    def get(self, key: int) -> Context | None:
        """The context with this key; None if it was dropped."""
        return self._contexts.get(key)

    def find(self, name: str, hashes: BlockHashes) -> Context | None:
        """The context that a prompt extends; None if there is none.

        Args:
            name: the client's session id; empty for the contexts without one.
            hashes: block hashes of the prompt.
        """
        return self._tails.find(name, hashes)

    def add(self, name: str, hashes: BlockHashes, now: float) -> Context:
        """Creates a context; a sub-agent's context belongs to the session with its id."""
        session = self._named.get(name) if name else None
        if session is None:
            session = Session(name, now)
            if name:
                self._named[name] = session
        born = session.born if len(session.contexts) < MAX_SUB_AGENTS else now
        context = Context(self._new_key(name, hashes), session, born)
        self._contexts[context.key] = session.contexts[context.key] = context
        return context

    def extend(self, context: Context, hashes: BlockHashes, num_tokens: int) -> None:
        """Records the prompt of the context's last request."""
        self._contexts.move_to_end(context.key)
        context.num_tokens = num_tokens
        block = len(hashes) - 1 - _OPEN_BLOCKS
        context.tail_block = block
        context.tail = hashes.item(block) if block >= 0 else 0
        self._tails.put(context)

    def dropped(self) -> list[Context]:
        """Removes contexts beyond the maximum that have no requests in flight; returns them."""
        excess = len(self._contexts) - self._max_contexts
        victims: list[Context] = []
        if excess > 0:
            idle = (context for context in self._contexts.values() if not context.num_open)
            victims = list(islice(idle, excess))
        for context in victims:
            self.remove(context)
        return victims

    def remove(self, context: Context) -> None:
        """Removes a context. Idempotent."""
        if self._contexts.pop(context.key, None) is None:
            return
        session = context.session
        del session.contexts[context.key]
        if session.name and not session.contexts:
            del self._named[session.name]
        self._tails.drop(context)

    def check_invariants(self) -> None:
        """Raises AssertionError if the contexts and their indexes are inconsistent."""
        for key, context in self._contexts.items():
            assert context.key == key
            assert context.session.contexts[key] is context
            name = context.session.name
            assert not name or self._named[name] is context.session
        named = sum(len(session.contexts) for session in self._named.values())
        assert named == sum(bool(c.session.name) for c in self._contexts.values())
        assert all(session.contexts for session in self._named.values())
        self._tails.check_invariants(self._contexts)

    def _new_key(self, name: str, hashes: BlockHashes) -> int:
        block = min(len(hashes), _NAMED_BLOCKS) if name else len(hashes)
        last = hashes.item(block - 1) if block else 0
        copy = 0
        while True:
            key = int(xxh3_64_intdigest(f"{last}.{copy}.{name}".encode()))
            if key not in self._contexts:
                return key
            copy += 1


class _Tails:
    """Contexts found by the hash of a block near the end of their last prompts.

    A search is one array operation over all contexts, for prompts of any length.
    """

    def __init__(self) -> None:
        self._contexts: list[Context | None] = []
        self._free: list[int] = []
        self._hashes = np.zeros(0, np.uint64)
        self._blocks = np.zeros(0, np.int64)
        """Index of the tail's block in the prompt, by slot; `_NEVER` in free slots."""

    def find(self, name: str, hashes: BlockHashes) -> Context | None:
        """The context of session `name` that the prompt extends, the one with the longest prompt if
        there are several; None if there is none."""
        slots = np.flatnonzero(self._blocks < len(hashes))
        if not len(slots):
            return None
        slots = slots[hashes[self._blocks[slots]] == self._hashes[slots]]
        found = [context for slot in slots.tolist() if (context := self._contexts[slot])]
        mine = [context for context in found if context.session.name == name]
        return max(mine, key=lambda context: context.tail_block, default=None)

    def put(self, context: Context) -> None:
        """Adds a context, or updates its tail."""
        if context.tail_block < 0:
            self.drop(context)
            return
        if context.slot < 0:
            context.slot = self._new_slot()
            self._contexts[context.slot] = context
        self._hashes[context.slot] = context.tail
        self._blocks[context.slot] = context.tail_block

    def drop(self, context: Context) -> None:
        """Removes a context. Idempotent."""
        if context.slot >= 0:
            self._contexts[context.slot] = None
            self._blocks[context.slot] = _NEVER
            self._free.append(context.slot)
            context.slot = -1

    def check_invariants(self, contexts: OrderedDict[int, Context]) -> None:
        """Raises AssertionError if slots and `contexts` are inconsistent."""
        placed = {c.slot: c for c in contexts.values() if c.slot >= 0}
        for slot, context in enumerate(self._contexts):
            assert context is placed.get(slot)
            if context is None:
                assert self._blocks[slot] == _NEVER
                assert slot in self._free
            else:
                assert self._hashes[slot].item() == context.tail
                assert self._blocks[slot].item() == context.tail_block

    def _new_slot(self) -> int:
        if self._free:
            return self._free.pop()
        slot = len(self._contexts)
        self._contexts.append(None)
        if slot == len(self._blocks):
            size = max(2 * slot, 64)
            self._hashes = grown(self._hashes, size)
            self._blocks = grown(self._blocks, size, _NEVER)
        return slot
