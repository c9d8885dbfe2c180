"""HashMemo: block hashes of earlier prompts, so that a conversation is not rehashed with each
turn."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from worker.protocol.blocks import TOKEN_BYTES, BlockHashes, block_hash_array

_SEGMENT = 256
"""Blocks per cached segment."""
_MAX_SEGMENTS = 16_384
"""Maximum number of cached segments: about 35 MB, for 67 million tokens if pages have 16 tokens."""


class HashMemo:
    """LRU cache of the block hashes of prompt prefixes, looked up by their tokens.

    A segment is looked up by a digest of the prompt up to the segment's end, which is about thirty
    times faster than computing its block hashes. Thread-safe.

    Args:
        max_segments: maximum number of cached segments.
    """

    def __init__(self, max_segments: int = _MAX_SEGMENTS) -> None:
        # Not an LRUCache, which takes 1 to 3 us for each of the 32 segments of 128k tokens.
        self._segments: OrderedDict[tuple[int, int], BlockHashes] = OrderedDict()
        """Block hashes of each segment, by page size and digest; least recently used first."""
        self._max_segments = max_segments
        self._lock = threading.Lock()

    def hashes(self, token_ids: bytes, page_size: int, root: int) -> BlockHashes:
        """`block_hash_array(token_ids, page_size, root)`, using the cache as far as possible."""
        width = _SEGMENT * page_size * TOKEN_BYTES
        end = len(token_ids) - len(token_ids) % width
        if not end:
            return block_hash_array(token_ids, page_size, root)
        view = memoryview(token_ids)
        known: list[BlockHashes] = []
        names: list[tuple[int, int]] = []
        name = root
        for start in range(0, end, width):
            digest: Any = xxh3_64_intdigest(view[start : start + width], name)
            name = int(digest)
            names.append((page_size, name))
        with self._lock:
            for key in names:
                segment = self._segments.get(key)
                if segment is None:
                    break
                self._segments.move_to_end(key)
                known.append(segment)
        start = len(known) * width
        parent = known[-1].item(_SEGMENT - 1) if known else root
        if start < len(token_ids):
            rest = block_hash_array(view[start:], page_size, parent)
            with self._lock:
                for place, key in enumerate(names[len(known) :]):
                    # A copy; otherwise the segment would keep all of the prompt's hashes alive.
                    self._segments[key] = rest[place * _SEGMENT : (place + 1) * _SEGMENT].copy()
                while len(self._segments) > self._max_segments:
                    self._segments.popitem(last=False)
            known.append(rest)
        return np.concatenate(known)
