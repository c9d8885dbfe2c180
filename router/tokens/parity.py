"""Refuses workers whose prompts would not be this gateway's."""

from __future__ import annotations

from worker.wire.messages import EngineInfo, TokenizerFingerprint
from worker.wire.tokenizer import Tokenizer
from worker.wire.tokenizer_fingerprint import difference, fingerprint


class ParityCheck:
    """Compares a worker's tokenizer fingerprint with one computed here.

    Args:
        tokenizer: of the model, as this gateway loaded it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[tuple[int, str], TokenizerFingerprint] = {}

    def __call__(self, info: EngineInfo) -> str | None:
        """What differs; None if nothing does, or the worker has no tokenizer to tell."""
        if info.tokenizer_fingerprint is None:
            return None
        key = (info.page_size, info.block_hash_salt)
        if key not in self._known:
            self._known[key] = fingerprint(self._tokenizer, *key)
        return difference(self._known[key], info.tokenizer_fingerprint)
