"""PromptBlocks: a prompt with the hashes of its full blocks, which are used for routing."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from router.fleet.memo import HashMemo
from worker.protocol.adapters import AdapterRef
from worker.protocol.blocks import (
    TOKEN_BYTES,
    BlockHashes,
    block_hash_array,
    cache_scope,
    root_hash,
)
from worker.protocol.limits import largest_token
from worker.protocol.messages import DEFAULT_PRIORITY, EngineInfo


class BlockKey(msgspec.Struct, frozen=True):
    """Engine parameters that block hashes depend on, besides the prompt."""

    page_size: int
    block_hash_salt: str

    @classmethod
    def of(cls, info: EngineInfo) -> BlockKey:
        """The block-hash parameters of a worker's engine."""
        return cls(info.page_size, info.block_hash_salt)


class PromptBlocks:
    """Prompt tokens with their block hashes, computed once per kind of engine.

    Args:
        token_ids: the prompt's tokens as little-endian int32.
        cache_salt: the client's salt, which isolates its prefix cache.
        adapter: LoRA adapter, whose version affects keys and values; None if there is none.
        tenant: tenant that the prefix cache belongs to if tenants are isolated; otherwise empty.
        session: the client's conversation id; empty if there is none.
        memo: block hashes of earlier prompts; None to compute all hashes.
    """

    __slots__ = (
        "_hashes",
        "_memo",
        "adapter",
        "cache_salt",
        "has_tools",
        "largest_token",
        "priority",
        "second_text",
        "session",
        "token_ids",
    )

    def __init__(
        self,
        token_ids: bytes,
        cache_salt: str = "",
        *,
        adapter: AdapterRef | None = None,
        tenant: str = "",
        session: str = "",
        memo: HashMemo | None = None,
    ) -> None:
        self.token_ids = token_ids
        self.largest_token = largest_token(token_ids)
        """Largest token id, read as unsigned, so that negative ids exceed every vocabulary."""
        self.adapter = adapter
        version = "" if adapter is None else adapter.version
        self.cache_salt = cache_scope(cache_salt, version, tenant)
        """Cache salt of the request's Submit, combining salt, adapter and tenant."""
        self.session = session
        self.has_tools = False
        """Whether the request has tools."""
        self.priority = DEFAULT_PRIORITY
        """Priority of the request."""
        self.second_text = 0
        """Index of the first token of a pair's second text; 0 if the prompt has none."""
        self._memo = memo
        self._hashes: dict[BlockKey, BlockHashes] = {}

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return len(self.token_ids) // TOKEN_BYTES

    def followed_by(self, token_ids: Sequence[int]) -> PromptBlocks:
        """A prompt that consists of this one and more tokens."""
        if not token_ids:
            return self
        longer = PromptBlocks(
            self.token_ids + np.asarray(token_ids, dtype="<i4").tobytes(),
            session=self.session,
            memo=self._memo,
        )
        longer.adapter = self.adapter
        longer.cache_salt = self.cache_salt
        longer.has_tools = self.has_tools
        longer.priority = self.priority
        return longer

    def hashes(self, key: BlockKey) -> BlockHashes:
        """Block hashes of the full pages, as computed by engines with these parameters."""
        known = self._hashes.get(key)
        if known is None:
            root = root_hash(key.block_hash_salt, self.cache_salt)
            compute = block_hash_array if self._memo is None else self._memo.hashes
            known = self._hashes[key] = compute(self.token_ids, key.page_size, root)
        return known
