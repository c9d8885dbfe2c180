"""Tokenizer fingerprint: verifies that gateway and worker render, tokenize and hash prompts
identically.

A mismatch would cause no errors, but prompts would be routed as if no worker had cached them. A
worker therefore sends digests of a probe chat, and a gateway whose digests differ rejects the
worker.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from worker.protocol.blocks import block_hash_array, root_hash
from worker.protocol.messages import TokenizerFingerprint
from worker.protocol.text.tokenizer import Tokenizer

_TEXT = (
    "Größe 42, naïve café — “quoted”, 日本語, 🙂👩‍🚀, tabs\tand  spaces;\n"
    "def f(x):\n    return x ** 2  # 3.14159\n"
)
_MESSAGES = [{"role": "user", "content": _TEXT * 4}]
_SCOPE = "tokenizer fingerprint"


def fingerprint(tokenizer: Tokenizer, page_size: int, block_hash_salt: str) -> TokenizerFingerprint:
    """Digests of the probe chat as rendered, tokenized and hashed by this process."""
    text = _TEXT * 4
    if tokenizer.chat_template is not None:
        try:
            # A template may include today's date, which may differ between gateway and worker.
            text = tokenizer.render_chat(_MESSAGES, strftime_now=str)
        except ValueError:
            text += "(the template refuses the probe)"
    tokens = np.asarray(tokenizer.encode(text, add_special_tokens=False), "<i4")
    hashes = block_hash_array(tokens, page_size, root_hash(block_hash_salt, _SCOPE))
    return TokenizerFingerprint(
        text=_digest(text.encode()),
        num_tokens=len(tokens),
        tokens=_digest(tokens.tobytes()),
        blocks=_digest(hashes.tobytes()),
    )


def difference(mine: TokenizerFingerprint, theirs: TokenizerFingerprint) -> str | None:
    """First difference between the fingerprints of a gateway and a worker, with a remedy; None if
    they are equal."""
    remedy = "serve the same checkpoint and release on both sides"
    if mine.text != theirs.text:
        return f"its chat template renders the same chat differently: {remedy}"
    if mine.tokens != theirs.tokens:
        return (
            f"its tokenizer encodes a chat as {theirs.num_tokens} tokens, which differ from the "
            f"{mine.num_tokens} tokens here: {remedy}"
        )
    if mine.blocks != theirs.blocks:
        return f"it hashes the same tokens differently: {remedy}"
    return None


def _digest(data: bytes) -> int:
    digest: Any = xxh3_64_intdigest(data)
    return int(digest)
