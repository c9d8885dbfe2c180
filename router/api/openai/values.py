"""Limits the number of values in a JSON body before decoding it, as decoding holds the GIL."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from router.api.http.body import Payload
from router.errors import bad_request

MAX_VALUES = 1 << 20
"""Maximum number of values in a body: enough for a prompt of a million token ids. Decoding that
many numbers holds the GIL for 25 ms, and a string of one letter takes about 60 bytes of memory. The
16 million values that fit into a body would block all streams for seconds."""
CONTAINER = 16
"""Number of values that an object or a list counts as, according to its decoding time."""
MEMBER = 4
"""Number of values that a member of an object counts as, in addition to its value."""
CHUNK_BYTES = 1 << 20
"""Bytes scanned at a time; about ten arrays of that size are in memory."""

_COST: NDArray[np.uint8] = np.zeros(256, np.uint8)
for _sign, _cost in ((b"[", CONTAINER), (b"{", CONTAINER), (b",", 1), (b":", MEMBER)):
    _COST[ord(_sign)] = _cost


def check_num_values(*texts: Payload) -> None:
    """Checks the number of values in JSON texts without decoding them; the contents of strings do
    not count.

    Raises:
        ApiError: 400 if the texts have more than MAX_VALUES in total.
    """
    if sum(map(_bound, texts)) <= MAX_VALUES:
        return
    number = sum(map(num_values, texts))
    if number > MAX_VALUES:
        raise bad_request(
            f"the body has {number} values; the maximum is {MAX_VALUES} (an object or list counts "
            f"as {CONTAINER} values, a member of an object as {MEMBER})"
        )


def num_values(body: Payload) -> int:
    """Number of values in a JSON text as counted for the limit; numpy releases the GIL while
    counting."""
    total, is_inside, is_escaped = 0, False, False
    for start in range(0, len(body), CHUNK_BYTES):
        data = np.frombuffer(body, np.uint8, min(CHUNK_BYTES, len(body) - start), start)
        quotes, is_escaped = delimiting_quotes(data, is_escaped)
        inside = np.bitwise_xor.accumulate(quotes)
        if is_inside:
            inside = ~inside
        is_inside = bool(inside[-1])
        total += int(_COST[data[~inside]].sum(dtype=np.int64))
    return total


def _bound(body: Payload) -> int:
    """An upper bound of `num_values`, which also counts the contents of strings; takes at most 10
    ms."""
    containers = body.count(b"[") + body.count(b"{")
    return CONTAINER * containers + MEMBER * body.count(b":") + body.count(b",")


def delimiting_quotes(data: NDArray[np.uint8], is_escaped: bool) -> tuple[NDArray[np.bool_], bool]:
    """Finds quotes that start or end a string.

    Args:
        data: bytes of a chunk.
        is_escaped: whether the first byte of `data` is escaped by the previous chunk.

    Returns:
        For each byte, whether it is such a quote; and whether the first byte of the next chunk is
        escaped.
    """
    slashes = data == ord("\\")
    if not slashes.any():
        quotes = data == ord('"')
        if is_escaped:
            quotes[0] = False
        return quotes, False
    places = np.arange(len(data), dtype=np.int32)
    # The last index up to each that is not a backslash: -1 before the chunk, or -2 if a backslash
    # there escapes the first byte.
    others = np.where(slashes, np.int32(-1 - is_escaped), places)
    np.maximum.accumulate(others, out=others)
    runs = places - others  # length of the run of backslashes that ends at each index
    odd = (runs & 1).astype(bool)
    quotes = data == ord('"')
    quotes[1:] &= ~odd[:-1]
    if is_escaped:
        quotes[0] = False
    return quotes, bool(odd[-1])
