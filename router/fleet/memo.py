"""Hashes of pieces of prompts seen before: a conversation is hashed once, not once per turn."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from worker.wire.blocks import TOKEN_BYTES, BlockHashes, block_hash_array

_PIECE = 256
"""Blocks that are remembered together."""
_MAX_PIECES = 16_384
"""About 35 MB, and 67 million tokens at pages of 16."""


class HashMemo:
    """Finds a prompt's leading blocks by what they contain; no session need be named.

    A piece is looked up by a digest over it and all before it, at memory speed: some thirty times
    faster than its block hashes are computed. Safe to use from several threads.
    """

    def __init__(self, max_pieces: int = _MAX_PIECES) -> None:
        self._max_pieces = max_pieces
        self._pieces: dict[tuple[int, int], BlockHashes] = {}
        """By page size and digest; the least recently used first."""
        self._lock = threading.Lock()

    def hashes(self, token_ids: bytes, page_size: int, root: int) -> BlockHashes:
        """Same as `block_hash_array(token_ids, page_size, root)`."""
        width = _PIECE * page_size * TOKEN_BYTES
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
            if len(known) + 1 == len(names) and (piece := self._recall(names[-1])) is not None:
                known.append(piece)
        start = len(known) * width
        parent = known[-1].item(_PIECE - 1) if known else root
        if start < len(token_ids):
            rest = block_hash_array(view[start:], page_size, parent)
            for place in range(len(known), len(names)):
                begin = (place - (start // width)) * _PIECE
                self._remember(names[place], rest[begin : begin + _PIECE].copy())
            known.append(rest)
        return np.concatenate(known)

    def _recall(self, name: tuple[int, int]) -> BlockHashes | None:
        with self._lock:
            piece = self._pieces.pop(name, None)
            if piece is not None:
                self._pieces[name] = piece
            return piece

    def _remember(self, name: tuple[int, int], piece: BlockHashes) -> None:
        with self._lock:
            self._pieces[name] = piece
            if len(self._pieces) > self._max_pieces:
                del self._pieces[next(iter(self._pieces))]
