"""Bodies: reads request bodies, with limits on their size, time and total memory."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

from starlette.requests import ClientDisconnect, Request

from router.errors import ApiError, bad_request, busy, timed_out, too_large

MAX_BODY_BYTES = 32 * 2**20
"""Maximum size of a body in bytes, after decompression. The body is kept in memory while its
request waits for tokenization."""

PIECE_BYTES = 2**18
"""Maximum number of bytes decompressed at a time, which takes about a millisecond; other requests
run in between."""
MAX_DIGITS = 18
"""Maximum number of digits in content-length: Python rejects integers of thousands of digits."""
Payload = bytes | bytearray
"""A complete request body."""
FORM_TYPES = ("application/x-www-form-urlencoded", "multipart/form-data", "text/plain")
"""Content types that browsers send cross-origin without a CORS preflight."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BodyLimits:
    """Limits on the time and memory of request bodies."""

    window_s: float = 10.0
    """Seconds within which the next `window_bytes`, or the rest of the body, must arrive."""
    window_bytes: int = 64 * 2**10
    """Bytes that must arrive per window. The default, 6.4 KiB/s, matches HAProxy, which times out
    after 10 s for a buffer of 64 KiB."""
    total_s: float = 300.0
    """Seconds within which the entire body must arrive; a body of the maximum size therefore needs
    0.9 Mbit/s."""
    bytes_in_flight: int = 512 * 2**20
    """Maximum total size in bytes of all bodies being received or tokenized."""


class Bodies:
    """Reads the request bodies of one gateway, on its event loop."""

    def __init__(self, limits: BodyLimits | None = None) -> None:
        self._limits = limits or BodyLimits()
        self.num_bytes = 0
        """Bytes in flight: total size of the bodies being received or still in use."""
        self._deadlines: dict[asyncio.Timeout, float] = {}
        """Deadline for the next bytes of each body, on the event loop's clock. The keys are the
        bodies' timeouts."""
        self._is_sweeping = False

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytearray]:
        """Receives and decompresses a body, which counts as in flight until the `with` block exits.

        Raises:
            ApiError: 413 as soon as the body exceeds the limit; 408 if it arrives too slowly; 503
                if too many bytes are in flight; 415 for a form or an encoding other than gzip; 400
                for invalid gzip, or if the client disconnects.
        """
        _check_content_type(request)
        length = request.headers.get("content-length", "")
        if length.isdecimal() and (len(length) > MAX_DIGITS or int(length) > MAX_BODY_BYTES):
            raise _too_large()
        held = _Held(self)
        try:
            try:
                payload = await self._receive(request, held)
            except ClientDisconnect:
                raise bad_request("client disconnected before sending the complete body") from None
            except TimeoutError:
                raise timed_out(
                    "timed out while receiving the request body: retry, or send a smaller request"
                ) from None
            yield payload
        finally:
            held.release()

    async def _receive(self, request: Request, held: _Held) -> bytearray:
        """Receives a body. Raises ApiError, ClientDisconnect, TimeoutError.

        Parts are appended as they arrive: joining all parts of a body of the maximum size at the
        end would block the event loop for 25 ms and take twice the memory.
        """
        limits, clock = self._limits, asyncio.get_running_loop().time
        gunzip = _gunzip_of(request)
        body = bytearray()
        last = clock() + limits.total_s
        num_new = 0
        timeout = asyncio.timeout(None)
        # Closed here, since the garbage collector would close each stream in a separate task.
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
        """Appends a part to a body. Raises ApiError if that exceeds a limit."""
        held.add(len(part))
        if held.num_bytes > MAX_BODY_BYTES:
            raise _too_large()
        if self.num_bytes > self._limits.bytes_in_flight:
            raise busy("too many large requests are being received: try again shortly")
        body += part

    def _sweep_later(self) -> None:
        """Starts one timer that checks all deadlines, which is cheaper than one timer per body."""
        if not self._is_sweeping and self._deadlines:
            self._is_sweeping = True
            loop = asyncio.get_running_loop()
            period = min(self._limits.window_s, self._limits.total_s) / 4
            loop.call_later(period, self._sweep, loop.time() + 2 * period)

    def _sweep(self, latest: float) -> None:
        """Aborts bodies past their deadlines, unless called after `latest`: in that case, the event
        loop was slow, not the clients."""
        self._is_sweeping = False
        now = asyncio.get_running_loop().time()
        for timeout, deadline in self._deadlines.items():
            if deadline <= now <= latest and not timeout.expired():
                timeout.reschedule(now)
        self._sweep_later()


class _Held:
    """Bytes in flight of one body."""

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
    """Decompresses a gzip body in pieces of at most PIECE_BYTES, regardless of the compression
    ratio."""

    __slots__ = ("_inflate",)

    def __init__(self) -> None:
        self._inflate = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)

    def pieces(self, part: bytes) -> Iterator[bytes]:
        """Decompresses the next part of the body. Raises ApiError (400) if it is invalid."""
        piece = b""
        while part or len(piece) == PIECE_BYTES:
            try:
                piece = self._inflate.decompress(part, PIECE_BYTES)
            except zlib.error as error:
                raise bad_request(
                    "the body is not valid gzip data, although Content-Encoding is gzip"
                ) from error
            if self._inflate.unused_data:
                raise bad_request("trailing data after gzip stream")
            part = self._inflate.unconsumed_tail
            yield piece

    def end(self) -> None:
        """Raises ApiError (400) if the gzip stream is incomplete."""
        if not self._inflate.eof:
            raise bad_request("truncated gzip stream")


def _check_content_type(request: Request) -> None:
    """Raises ApiError (415) for form content types, which pages of other sites can send."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind in FORM_TYPES:
        raise ApiError(415, f"unsupported content type {kind!r}: send application/json")


def _gunzip_of(request: Request) -> _Gunzip | None:
    """A decompressor for the request's body; None if it is not compressed.

    Raises:
        ApiError: 415 for an encoding other than gzip.
    """
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding in ("", "identity"):
        return None
    if encoding not in ("gzip", "x-gzip"):
        raise ApiError(415, f"unsupported content encoding {encoding[:32]!r}: send gzip or none")
    return _Gunzip()


def _too_large() -> ApiError:
    return too_large(f"the body is too large: the maximum is {MAX_BODY_BYTES} bytes")
