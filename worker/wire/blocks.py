"""Hashes of full pages of tokens, chained: equal hashes mean (almost surely) an equal prefix.

Gateway and worker compute the same hashes, so that a gateway can tell which worker holds a prompt.
Hashes only route; before a worker reuses a page it compares the token ids themselves.
"""

from __future__ import annotations

from array import array
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

TokenBuffer: TypeAlias = "bytes | bytearray | memoryview | array[int] | NDArray[np.int32]"
"""Token ids as a contiguous buffer of little-endian int32."""

TOKEN_BYTES = 4


def root_hash(block_hash_salt: str, cache_salt: str = "") -> int:
    """Start of a chain: unsigned 64-bit, one value per model (and revision) and cache salt."""
    salt = block_hash_salt.encode()
    # The length keeps ("ab", "c") and ("a", "bc") apart.
    return _digest(len(salt).to_bytes(4, "little") + salt + cache_salt.encode(), 0)


def block_hashes(token_ids: TokenBuffer, page_size: int, parent: int) -> list[int]:
    """One unsigned 64-bit hash per full page of `token_ids`; a last page that is not full has none.

    `parent` is `root_hash(...)` at the start of a chain, or the hash of the page before the first
    to extend one. Each hash is the xxh3 of its page seeded with the hash before.

    Raises:
        ValueError: the buffer's items are not 4 bytes wide (or single bytes).
    """
    view = token_ids.data if isinstance(token_ids, np.ndarray) else memoryview(token_ids)
    if view.itemsize not in (1, TOKEN_BYTES):
        raise ValueError(f"token ids must be int32, got items of {view.itemsize} bytes")
    data = view.cast("B")
    width = page_size * TOKEN_BYTES
    hashes: list[int] = []
    for start in range(0, len(data) - width + 1, width):
        parent = _digest(data[start : start + width], parent)
        hashes.append(parent)
    return hashes


def _digest(data: bytes | memoryview, seed: int) -> int:
    digest: Any = xxh3_64_intdigest(data, seed)
    return int(digest)
