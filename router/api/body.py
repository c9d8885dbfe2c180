"""Bodies of requests: bounded in size, in time, and in what all of them hold together."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

from starlette.requests import ClientDisconnect, Request

from router.errors import ApiError, bad_request, busy, timed_out, too_large

MAX_BODY_BYTES = 32 * 2**20
"""A body is held in memory for as long as its request waits."""

PIECE_BYTES = 2**18
"""Bytes of a compressed body that are unpacked at once: a millisecond. Other requests get theirs in
between."""
MAX_DIGITS = 18
"""Python refuses to read numbers of thousands of digits."""
Payload = bytes | bytearray
"""A whole body."""
FORM_TYPES = ("application/x-www-form-urlencoded", "multipart/form-data", "text/plain")
"""Content types of bodies that browsers send for a page of any origin, without asking first whether
they may."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BodyLimits:
    """How patient a gateway is with bodies."""

    window_s: float = 10.0
    """Seconds of a window, in each of which `window_bytes` must come, or the rest of the body."""
    window_bytes: int = 64 * 2**10
    """Bytes that must come in a window: with its length 6.4 KiB/s, which HAProxy's 10 s for its
    buffer of 64 KiB ask for as well."""
    total_s: float = 300.0
    """Seconds for a whole body: the largest takes 0.9 Mbit/s."""
    bytes_in_flight: int = 512 * 2**20
    """Bytes of all bodies that are received, or received and not yet tokenized."""


class Bodies:
    """Reads the bodies of one gateway. Belongs to its event loop."""

    def __init__(self, limits: BodyLimits | None = None) -> None:
        self._limits = limits or BodyLimits()
        self.num_bytes = 0
        """Bytes in flight: received, counted as they come, until their requests need them no
        more."""
        self._deadlines: dict[asyncio.Timeout, float] = {}
        """Deadlines for the next bytes of bodies, on the event loop's clock."""
        self._is_sweeping = False

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytearray]:
        """The whole body, unpacked, which counts as in flight until the block ends.

        Raises:
            ApiError: 413 as soon as it is known to exceed the limit; 408 if it comes too slowly;
                503 if too much is in flight; 415 if it is a form, or is packed otherwise than by
                gzip; 400 if it cannot be unpacked, or the client goes away.
        """
        _refuse_forms(request)
        length = request.headers.get("content-length", "")
        if length.isdecimal() and (len(length) > MAX_DIGITS or int(length) > MAX_BODY_BYTES):
            raise _too_large()
        held = _Held(self)
        try:
            try:
                payload = await self._receive(request, held)
            except ClientDisconnect:
                raise bad_request("the client went away before its body was complete") from None
            except TimeoutError:
                raise timed_out("the body came too slowly: try a faster connection") from None
            yield payload
        finally:
            held.release()

    async def _receive(self, request: Request, held: _Held) -> bytearray:
        """Raises ApiError, ClientDisconnect, TimeoutError.

        Parts are appended as they come: to join those of the largest body at its end would halt
        all streams of this process for 25 ms, and hold it twice.
        """
        limits, clock = self._limits, asyncio.get_running_loop().time
        gunzip = _gunzip_of(request)
        body = bytearray()
        last = clock() + limits.total_s
        num_new = 0
        timeout = asyncio.timeout(None)
        # Closed at once: left to the garbage collector, each stream would end in a task of its own.
        async with timeout, aclosing(request.stream()) as stream:
            self._deadlines[timeout] = min(clock() + limits.window_s, last)
            self._sweep_later()
            try:
                async for part in stream:
                    if gunzip is None:
                        self._hold(part, held, body)
                    else:
                        for piece in gunzip.pieces(part):
                            self._hold(piece, held, body)
                            await asyncio.sleep(0)
                    num_new += len(part)
                    if num_new >= limits.window_bytes:
                        num_new = 0
                        self._deadlines[timeout] = min(clock() + limits.window_s, last)
            finally:
                del self._deadlines[timeout]
        if gunzip is not None:
            gunzip.end()
        return body

    def _hold(self, part: bytes, held: _Held, body: bytearray) -> None:
        """Appends a part of a body. Raises ApiError where that is too much."""
        held.add(len(part))
        if held.num_bytes > MAX_BODY_BYTES:
            raise _too_large()
        if self.num_bytes > self._limits.bytes_in_flight:
            raise busy("too many large requests are being received: try again shortly")
        body += part

    def _sweep_later(self) -> None:
        """Has the deadlines looked at: one timer for all, where each would pay for its own."""
        if not self._is_sweeping and self._deadlines:
            self._is_sweeping = True
            loop = asyncio.get_running_loop()
            period = min(self._limits.window_s, self._limits.total_s) / 4
            loop.call_later(period, self._sweep, loop.time() + 2 * period)

    def _sweep(self, latest: float) -> None:
        """Ends what is late, unless this comes after `latest`: then it was the event loop."""
        self._is_sweeping = False
        now = asyncio.get_running_loop().time()
        for timeout, deadline in self._deadlines.items():
            if deadline <= now <= latest and not timeout.expired():
                timeout.reschedule(now)
        self._sweep_later()


class _Held:
    """The bytes that one body has in flight."""

    __slots__ = ("_bodies", "num_bytes")

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._bodies.num_bytes += num_bytes

    def release(self) -> None:
        self._bodies.num_bytes -= self.num_bytes


class _Gunzip:
    """Unpacks one body in pieces, however much a byte of it stands for."""

    __slots__ = ("_inflate",)

    def __init__(self) -> None:
        self._inflate = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)

    def pieces(self, part: bytes) -> Iterator[bytes]:
        """The bytes that the next part of the body stands for. Raises ApiError (400)."""
        piece = b""
        while part or len(piece) == PIECE_BYTES:
            try:
                piece = self._inflate.decompress(part, PIECE_BYTES)
            except zlib.error as error:
                raise bad_request(f"the body is not valid gzip: {error}") from error
            if self._inflate.unused_data:
                raise bad_request("the body goes on behind the end of its gzip")
            part = self._inflate.unconsumed_tail
            yield piece

    def end(self) -> None:
        """Raises ApiError (400) where the body has ended too early."""
        if not self._inflate.eof:
            raise bad_request("the body ends before its gzip does")


def _refuse_forms(request: Request) -> None:
    """Raises ApiError (415) for a body that says of itself to be no JSON, as forms do."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind in FORM_TYPES:
        raise ApiError(415, f"content-type {kind} is not taken: send application/json")


def _gunzip_of(request: Request) -> _Gunzip | None:
    """A decompressor of the request's body; None for one that is sent as it is. Raises ApiError
    (415)."""
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding in ("", "identity"):
        return None
    if encoding not in ("gzip", "x-gzip"):
        raise ApiError(415, f"content-encoding {encoding[:32]} is not taken: send gzip, or none")
    return _Gunzip()


def _too_large() -> ApiError:
    return too_large(f"the body is too large: at most {MAX_BODY_BYTES} bytes are taken")
