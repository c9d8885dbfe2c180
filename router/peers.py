"""Peers: calls between the gateways of one fleet, by gateway id."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

import msgspec

ID_PREFIX = "gw-"
"""Prefix of gateway ids; the rest is the process's id in the transport."""

Call = Callable[[bytes], Awaitable[bytes]]
"""Handler of a call: receives an encoded request, returns an encoded response."""
Stream = Callable[[bytes], AsyncIterator[bytes]]
"""Handler of a streaming call: receives an encoded request, yields encoded items."""


class PeerRequest(msgspec.Struct, frozen=True, array_like=True):
    """A call from one gateway to another."""

    method: str
    payload: bytes


class PeerTransport(Protocol):
    """Connections to the other gateways of the fleet."""

    def watch(self, on_change: Callable[[tuple[str, ...]], None]) -> None:
        """Calls `on_change` with the ids of all gateways, now and whenever the set changes."""
        ...

    async def call(self, peer_id: str, request: bytes) -> bytes:
        """Sends a PeerRequest; returns the response. Raises ConnectionError if the call fails."""
        ...

    def stream(self, peer_id: str, request: bytes) -> AsyncIterator[bytes]:
        """Sends a PeerRequest; yields the items of the response. Raises ConnectionError if the call
        fails."""
        ...


class Peers:
    """This gateway's calls to other gateways, and its handlers of their calls. Used on one event
    loop.

    Args:
        own_id: id of this gateway.
        transport: connections to the other gateways; None if this gateway is the only one.
    """

    def __init__(self, own_id: str, transport: PeerTransport | None = None) -> None:
        self.own_id = own_id
        self.ids: frozenset[str] = frozenset((own_id,))
        """Ids of all running gateways, except this one while it drains or has just started."""
        self._transport = transport
        self._calls: dict[str, Call] = {}
        self._streams: dict[str, Stream] = {}
        self._listeners: list[Callable[[], None]] = []

    @property
    def has_others(self) -> bool:
        """Whether any other gateway is running."""
        return bool(self.ids - {self.own_id})

    def start(self) -> None:
        """Starts watching the set of gateways."""
        if self._transport is not None:
            self._transport.watch(self._on_change)

    def on_change(self, listener: Callable[[], None]) -> None:
        """Calls `listener` whenever `ids` has changed."""
        self._listeners.append(listener)

    def handle_call(self, method: str, handler: Call) -> None:
        """Registers the handler of a method for `call`."""
        self._calls[method] = handler

    def handle_stream(self, method: str, handler: Stream) -> None:
        """Registers the handler of a method for `stream`."""
        self._streams[method] = handler

    async def call(self, peer_id: str, method: str, payload: bytes) -> bytes:
        """Calls another gateway. Raises ConnectionError if it is unreachable or fails."""
        return await self._reach(peer_id).call(peer_id, _encode(PeerRequest(method, payload)))

    def stream(self, peer_id: str, method: str, payload: bytes) -> AsyncIterator[bytes]:
        """Calls another gateway; yields the items of the response. Raises ConnectionError if it is
        unreachable or fails."""
        return self._reach(peer_id).stream(peer_id, _encode(PeerRequest(method, payload)))

    async def answer_call(self, request: bytes) -> bytes:
        """Handles a `call` from another gateway. Raises KeyError for an unknown method."""
        decoded = _decode(request)
        return await self._calls[decoded.method](decoded.payload)

    def answer_stream(self, request: bytes) -> AsyncIterator[bytes]:
        """Handles a `stream` from another gateway. Raises KeyError for an unknown method."""
        decoded = _decode(request)
        return self._streams[decoded.method](decoded.payload)

    def _reach(self, peer_id: str) -> PeerTransport:
        if self._transport is None or peer_id not in self.ids:
            raise ConnectionError(f"gateway {peer_id} is not running")
        return self._transport

    def _on_change(self, ids: tuple[str, ...]) -> None:
        self.ids = frozenset(ids) or frozenset((self.own_id,))
        for listener in self._listeners:
            listener()


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(PeerRequest).decode
