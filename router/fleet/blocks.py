"""A prompt as routing sees it: full blocks, by hash."""

from __future__ import annotations

import msgspec

from worker.wire.blocks import TOKEN_BYTES, block_hashes, root_hash
from worker.wire.messages import EngineInfo


class BlockKey(msgspec.Struct, frozen=True):
    """What block hashes depend on besides the prompt."""

    page_size: int
    block_hash_salt: str

    @classmethod
    def of(cls, info: EngineInfo) -> BlockKey:
        """The key of a worker's engine."""
        return cls(info.page_size, info.block_hash_salt)


class PromptBlocks:
    """Prompt tokens with their block hashes, computed once per kind of engine.

    Args:
        token_ids: little-endian int32.
        cache_salt: separates the prefix caches of clients.
    """

    __slots__ = ("_hashes", "cache_salt", "token_ids")

    def __init__(self, token_ids: bytes, cache_salt: str = "") -> None:
        self.token_ids = token_ids
        self.cache_salt = cache_salt
        self._hashes: dict[BlockKey, list[int]] = {}

    @property
    def num_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.token_ids) // TOKEN_BYTES

    def hashes(self, key: BlockKey) -> list[int]:
        """Chained hashes of the full blocks."""
        known = self._hashes.get(key)
        if known is None:
            root = root_hash(key.block_hash_salt, self.cache_salt)
            known = block_hashes(self.token_ids, key.page_size, root)
            self._hashes[key] = known
        return known
