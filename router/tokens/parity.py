"""Refuses workers whose prompts would not be this gateway's."""

from __future__ import annotations

from worker.wire.canary import difference, sing
from worker.wire.messages import Canary, EngineInfo
from worker.wire.tokenizer import Tokenizer


class ParityCheck:
    """Compares a worker's canary with one sung here.

    Args:
        tokenizer: of the model, as this gateway loaded it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[tuple[int, str], Canary] = {}

    def __call__(self, info: EngineInfo) -> str | None:
        """What differs; None if nothing does, or the worker has no tokenizer to tell."""
        if info.canary is None:
            return None
        key = (info.page_size, info.block_hash_salt)
        if key not in self._known:
            self._known[key] = sing(self._tokenizer, *key)
        return difference(self._known[key], info.canary)
