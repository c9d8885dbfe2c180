"""Chained block hashes of full pages of tokens: equal hashes mean (almost surely) equal prefixes.

Gateway and worker compute the same hashes, so a gateway can determine which worker has cached a
prompt. Hashes are only used for routing. Before a worker reuses a page, it compares the token ids.

    digest of a page    e = mix(Σ token[j]·key[j])
    hash of page i      h[i] = h[i-1]·M + e[i]          h[-1] is the root, or the parent

All values are modulo 2⁶⁴. The first line is multilinear hashing (Carter & Wegman 1979) with a final
mix. The second line, unlike a chain of digests, needs no loop: M is invertible, so h[i] =
Mⁱ·(M·h[-1] + Σ e[j]·M⁻ʲ), a running sum over all pages of a prompt. A client can construct two
prompts of a thousand pages that collide; this only affects how they are routed.
"""

from __future__ import annotations

from array import array
from functools import lru_cache
from operator import mul
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

TokenBuffer: TypeAlias = "bytes | bytearray | memoryview | array[int] | NDArray[np.int32]"
"""Token ids as a contiguous buffer of little-endian int32."""

BlockHashes: TypeAlias = NDArray[np.uint64]

TOKEN_BYTES = 4
_UINT32 = np.dtype("<u4")

_FEW = 4
"""Maximum number of pages for which plain integers are faster than arrays."""
_M64 = 2**64 - 1
_CHAIN = 0xD1342543DE82EF95
_CHAIN_INVERSE = pow(_CHAIN, -1, 2**64)
_GAMMA = 0x9E3779B97F4A7C15
_MIX_A = 0xBF58476D1CE4E5B9
_MIX_B = 0x94D049BB133111EB
# The same constants as arrays: numpy would convert other types on each use.
_GAMMA64, _MIX_A64, _MIX_B64, _30, _27, _31 = (
    np.array(value, np.uint64) for value in (_GAMMA, _MIX_A, _MIX_B, 30, 27, 31)
)


@lru_cache(maxsize=1024)
def root_hash(block_hash_salt: str, cache_salt: str = "") -> int:
    """Hash at the start of a chain (unsigned 64-bit), one per checkpoint and cache salt."""
    salt = block_hash_salt.encode()
    # The length distinguishes ("ab", "c") from ("a", "bc").
    data = len(salt).to_bytes(4, "little") + salt + cache_salt.encode()
    digest: Any = xxh3_64_intdigest(data)
    return int(digest)


def cache_scope(cache_salt: str = "", adapter: str = "", tenant: str = "") -> str:
    """Combines everything that separates prefix caches (salt, version of the LoRA adapter, tenant)
    into one cache salt.

    Different triples give different scopes, regardless of the salt that a client sends.
    """
    if not (adapter or tenant or cache_salt.startswith("\0")):
        return cache_salt
    return f"\0{len(tenant)}.{len(adapter)}.{tenant}{adapter}{cache_salt}"


def block_hashes(token_ids: TokenBuffer, page_size: int, parent: int) -> list[int]:
    """Unsigned 64-bit hashes of the full pages in `token_ids`.

    `parent` is `root_hash(...)` at the start of a chain, or the hash of the preceding page to
    extend a chain.

    Raises:
        ValueError: the buffer's items are neither 4 bytes wide nor single bytes.
    """
    tokens = _tokens(token_ids)
    count = len(tokens) // page_size
    if count > _FEW:
        hashes: list[int] = block_hash_array(token_ids, page_size, parent).tolist()
        return hashes
    keys = _page_keys(page_size)
    values = tokens.tolist()
    few: list[int] = []
    for start in range(0, count * page_size, page_size):
        digest = sum(map(mul, values[start : start + page_size], keys))
        parent = (parent * _CHAIN + _mix(digest + _GAMMA)) & _M64
        few.append(parent)
    return few


def block_hash_array(token_ids: TokenBuffer, page_size: int, parent: int) -> BlockHashes:
    """`block_hashes` as an array of uint64, without a loop over the pages."""
    tokens = _tokens(token_ids)
    count = len(tokens) // page_size
    pages = tokens[: count * page_size].reshape(count, page_size)
    # Not `@`, which takes three times as long for integers.
    digests: BlockHashes = np.vecdot(pages.astype(np.uint64), _page_key_array(page_size))
    digests += _GAMMA64
    _mix_in_place(digests)
    forward, backward = _powers(max(1024, 1 << (count - 1).bit_length()) if count else 1024)
    digests *= backward[:count]
    if count:
        digests[0] = digests.item(0) + parent * _CHAIN & _M64
    np.add.accumulate(digests, out=digests)
    digests *= forward[:count]
    return digests


def _tokens(token_ids: TokenBuffer) -> NDArray[np.uint32]:
    if isinstance(token_ids, bytes):  # the common case
        return np.frombuffer(token_ids, _UINT32, len(token_ids) // TOKEN_BYTES)
    view = token_ids.data if isinstance(token_ids, np.ndarray) else memoryview(token_ids)
    if view.itemsize not in (1, TOKEN_BYTES):
        raise ValueError(f"token ids must be int32, got items of {view.itemsize} bytes")
    data = view.cast("B")
    return np.frombuffer(data, _UINT32, len(data) // TOKEN_BYTES)


def _mix(value: int) -> int:
    """The finalizer of splitmix64: every bit of the input affects every bit of the output."""
    value &= _M64
    value = (value ^ (value >> 30)) * _MIX_A & _M64
    value = (value ^ (value >> 27)) * _MIX_B & _M64
    return value ^ (value >> 31)


def _mix_in_place(values: BlockHashes) -> None:
    values ^= values >> _30
    values *= _MIX_A64
    values ^= values >> _27
    values *= _MIX_B64
    values ^= values >> _31


@lru_cache(maxsize=16)
def _page_keys(page_size: int) -> tuple[int, ...]:
    return tuple(_mix((index + 2) * _GAMMA) | 1 for index in range(page_size))


@lru_cache(maxsize=16)
def _page_key_array(page_size: int) -> BlockHashes:
    return np.array(_page_keys(page_size), np.uint64)


@lru_cache(maxsize=4)
def _powers(count: int) -> tuple[BlockHashes, BlockHashes]:
    """Powers Mⁱ and M⁻ⁱ, modulo 2⁶⁴, for i < `count`."""
    tables = []
    for base in (_CHAIN, _CHAIN_INVERSE):
        powers = np.full(count, base, np.uint64)
        powers[0] = 1
        tables.append(np.cumprod(powers, dtype=np.uint64))
    return tables[0], tables[1]
