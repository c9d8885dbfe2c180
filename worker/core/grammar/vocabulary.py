"""The vocabulary as grammar libraries need it: what bytes each token stands for."""

from __future__ import annotations

from collections.abc import Sequence

from worker.wire.tokenizer import Tokenizer


def token_bytes(tokenizer: Tokenizer, vocab_size: int) -> list[bytes]:
    """Bytes of each token of the model; empty for special tokens and those without a name.

    A special token's name in a text is not that token, so grammars must not yield it.
    """
    special = tokenizer.special_token_ids
    return [
        b"" if token_id in special else tokenizer.token_bytes(token_id)
        for token_id in range(vocab_size)
    ]


def bits(token_ids: Sequence[int], vocab_size: int) -> bytes:
    """A mask with the bits of these tokens, of ceil(vocab / 32) little-endian words."""
    mask = bytearray(-(-vocab_size // 32) * 4)
    for token_id in token_ids:
        if token_id < vocab_size:
            mask[token_id // 8] |= 1 << token_id % 8
    return bytes(mask)
