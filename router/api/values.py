"""Values in a JSON body, counted before it is decoded: what decoding costs grows with them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from router.api.body import Payload
from router.errors import bad_request

MAX_VALUES = 1 << 20
"""Most values in one body: a prompt of a million token ids. The decoder keeps the interpreter's
lock, for so many numbers a fortieth of a second, and a text of one letter takes some 60 bytes; 16
million and more of what fits a body took all streams with them for seconds."""
CONTAINER = 16
"""Values that an object or a list counts for, by the time it takes."""
MEMBER = 4
"""Values that a member of an object counts for besides its own."""
_CHUNK = 1 << 20
"""Bytes that are looked at together: some ten arrays of it are held."""

_COST: NDArray[np.uint8] = np.zeros(256, np.uint8)
for _sign, _cost in ((b"[", CONTAINER), (b"{", CONTAINER), (b",", 1), (b":", MEMBER)):
    _COST[ord(_sign)] = _cost


def refuse_many_values(*texts: Payload) -> None:
    """Looks at a body, or at JSON in its texts, without decoding it.

    Texts within them may hold whatever they like.

    Raises:
        ApiError: 400, they hold more than MAX_VALUES together.
    """
    if sum(map(_bound, texts)) <= MAX_VALUES:
        return
    number = sum(map(num_values, texts))
    if number > MAX_VALUES:
        raise bad_request(
            f"the body holds too many values: {number}, at most {MAX_VALUES} are taken, where an "
            f"object or a list counts as {CONTAINER} and a member of an object as {MEMBER}"
        )


def num_values(body: Payload) -> int:
    """Values outside of texts; numpy lets other threads run meanwhile."""
    total, is_inside, is_escaped = 0, False, False
    for start in range(0, len(body), _CHUNK):
        data = np.frombuffer(body, np.uint8, min(_CHUNK, len(body) - start), start)
        quotes, is_escaped = _quotes(data, is_escaped)
        inside = np.bitwise_xor.accumulate(quotes)
        if is_inside:
            inside = ~inside
        is_inside = bool(inside[-1])
        total += int(_COST[data[~inside]].sum(dtype=np.int64))
    return total


def _bound(body: Payload) -> int:
    """An upper bound of the values in it, texts included: a hundredth of a second."""
    containers = body.count(b"[") + body.count(b"{")
    return CONTAINER * containers + MEMBER * body.count(b":") + body.count(b",")


def _quotes(data: NDArray[np.uint8], is_escaped: bool) -> tuple[NDArray[np.bool_], bool]:
    """The places of quotes that begin and end texts; and whether what follows `data` is escaped, as
    its begin was."""
    slashes = data == ord("\\")
    if not slashes.any():
        quotes = data == ord('"')
        if is_escaped:
            quotes[0] = False
        return quotes, False
    places = np.arange(len(data), dtype=np.int32)
    # The last place up to each that is no backslash; before the chunk there is one, or its half.
    others = np.where(slashes, np.int32(-1 - is_escaped), places)
    np.maximum.accumulate(others, out=others)
    runs = places - others  # backslashes up to and with each place
    odd = (runs & 1).astype(bool)
    quotes = data == ord('"')
    quotes[1:] &= ~odd[:-1]
    if is_escaped:
        quotes[0] = False
    return quotes, bool(odd[-1])
