"""KeyedNames: keyed hashes of block hashes and texts, which reveal only whether they are equal.

Block hashes are unkeyed: anyone with a log of them can hash a suspected prompt and check whether it
occurs. A key known only to the gateway prevents this.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from worker.protocol.blocks import BlockHashes

KEY_BYTES = 32
"""Bytes of a key: 16 for SipHash and 16 for BLAKE2b."""
_HALF = 16
_LENGTH = np.uint64(8 << 56)
"""SipHash's last word for messages of eight bytes."""


class KeyedNames:
    """Computes keyed hashes of block hashes and texts.

    Args:
        key: secret of KEY_BYTES bytes.
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"the key must have {KEY_BYTES} bytes, got {len(key)}")
        self._words = np.frombuffer(key[:_HALF], "<u8").astype(np.uint64)
        self._text_key = key[_HALF:]

    def blocks(self, hashes: BlockHashes) -> BlockHashes:
        """SipHash-2-4 of each block hash; takes about 1 ms per 10,000 hashes."""
        return _siphash(hashes.astype(np.uint64), self._words)

    def text(self, text: str) -> str:
        """Hexadecimal keyed hash of a text; empty for the empty text."""
        if not text:
            return ""
        return hashlib.blake2b(text.encode(), key=self._text_key, digest_size=8).hexdigest()


def _siphash(words: BlockHashes, key: NDArray[np.uint64]) -> BlockHashes:
    """SipHash-2-4 (Aumasson & Bernstein 2012) of each word as a message of eight bytes."""
    state = [
        np.full_like(words, np.uint64(constant) ^ key[n % 2])
        for n, constant in enumerate(
            (0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573)
        )
    ]
    for message in (words, _LENGTH):
        state[3] ^= message
        _rounds(state, 2)
        state[0] ^= message
    state[2] ^= np.uint64(0xFF)
    _rounds(state, 4)
    return state[0] ^ state[1] ^ state[2] ^ state[3]


def _rounds(state: list[BlockHashes], count: int) -> None:
    a, b, c, d = state
    for _ in range(count):
        for shift_b, shift_d in ((13, 16), (17, 21)):
            a += b
            c += d
            b = _rotated(b, shift_b) ^ a
            d = _rotated(d, shift_d) ^ c
            a = _rotated(a, 32)
            a, c = c, a
    state[:] = a, b, c, d


def _rotated(words: BlockHashes, bits: int) -> BlockHashes:
    return (words << np.uint64(bits)) | (words >> np.uint64(64 - bits))
