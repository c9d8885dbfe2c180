"""An in-memory network between the gateways of a test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

from router.peers import Peers


class PeerNetwork:
    """Gateways, keyed by id, and faults of the connections between them."""

    def __init__(self) -> None:
        self.members: dict[str, Peers] = {}
        self.broken: set[str] = set()
        """Gateways whose calls fail although they are still in the set."""
        self.stopped: set[str] = set()
        """Gateways that never respond."""
        self.num_calls = 0
        self._listeners: dict[str, Callable[[tuple[str, ...]], None]] = {}

    def join(self, own_id: str) -> Peers:
        peers = Peers(own_id, self)
        self.members[own_id] = peers
        self._joining = own_id
        peers.start()
        self._tell()
        return peers

    def leave(self, peer_id: str) -> None:
        """The process exits, and all others are notified."""
        del self.members[peer_id], self._listeners[peer_id]
        self._tell()

    def watch(self, on_change: Callable[[tuple[str, ...]], None]) -> None:
        self._listeners[self._joining] = on_change
        on_change(tuple(self.members))

    async def call(self, peer_id: str, request: bytes) -> bytes:
        self.num_calls += 1
        member = await self._reach(peer_id)
        response = await member.answer_call(request)
        await asyncio.sleep(0)
        return response

    async def stream(self, peer_id: str, request: bytes) -> AsyncIterator[bytes]:
        member = await self._reach(peer_id)
        async with aclosing(member.answer_stream(request)) as items:  # type: ignore[type-var]
            async for item in items:
                yield item
                if peer_id not in self.members:
                    raise ConnectionError(f"{peer_id} has ended")

    async def _reach(self, peer_id: str) -> Peers:
        await asyncio.sleep(0)
        if peer_id in self.stopped:
            await asyncio.Event().wait()
        if peer_id in self.broken or peer_id not in self.members:
            raise ConnectionError(f"{peer_id} cannot be reached")
        return self.members[peer_id]

    def _tell(self) -> None:
        for listener in tuple(self._listeners.values()):
            listener(tuple(self.members))
