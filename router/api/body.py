"""Reads request bodies within a limit."""

from __future__ import annotations

from contextlib import aclosing

from starlette.requests import ClientDisconnect, Request

from router.errors import ApiError, bad_request, too_large

MAX_BODY_BYTES = 32 * 2**20
"""A body is held in memory for as long as its request waits."""

MAX_DIGITS = 18
"""Python refuses to read numbers of thousands of digits."""


async def read_body(request: Request) -> bytes:
    """The whole body.

    Raises:
        ApiError: 413 as soon as it is known to exceed the limit; 400 if the client goes away.
    """
    length = request.headers.get("content-length", "")
    if length.isdecimal() and (len(length) > MAX_DIGITS or int(length) > MAX_BODY_BYTES):
        raise _too_large()
    parts: list[bytes] = []
    size = 0
    try:
        # Closed at once: left to the garbage collector, each stream would end in a task of its own.
        async with aclosing(request.stream()) as stream:
            async for part in stream:
                size += len(part)
                if size > MAX_BODY_BYTES:
                    raise _too_large()
                parts.append(part)
    except ClientDisconnect:
        raise bad_request("the client went away before its body was complete") from None
    return b"".join(parts)


def _too_large() -> ApiError:
    return too_large(f"the body is too large: at most {MAX_BODY_BYTES} bytes are taken")
