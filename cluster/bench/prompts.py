"""Token ids that prompts may use, and prompts as text for endpoints that take no ids."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from cluster.bench.datasets import Ids

UNKNOWN_VOCABULARY = range(100, 1000)
"""Token ids for prompts without a known tokenizer: vocabularies have them, and few are special."""
_FIT_ROUNDS = 8
"""Most attempts to fit the length of a text."""


class PromptSpace:
    """Vocabulary of prompts: ids of ordinary tokens, and text for token ids."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, folder: str | None) -> PromptSpace:
        """Reads `tokenizer.json` from a checkpoint's folder; None for no tokenizer.

        Raises ValueError where the folder has no such file.
        """
        if folder is None:
            return cls(None)
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"--tokenizer: no tokenizer.json in {folder}")
        return cls(Tokenizer.from_file(str(path)))

    @property
    def vocabulary(self) -> Ids:
        """Ids of ordinary tokens, ascending."""
        if self._tokenizer is None:
            return np.array(UNKNOWN_VOCABULARY, dtype=np.int64)
        added = self._tokenizer.get_added_tokens_decoder()
        size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        return np.array([i for i in range(size) if i not in added], dtype=np.int64)

    def as_text(self, token_ids: list[int]) -> str:
        """Text that tokenizes to as many tokens as `token_ids` has, or nearly so.

        Random ids that are decoded and encoded again give other ids, often fewer or more: the text
        is cut or extended until its length fits. Results use the server's own count.
        """
        if self._tokenizer is None:
            raise ValueError("prompts as text need --tokenizer FOLDER")
        wanted = len(token_ids)
        ids = token_ids
        for _ in range(_FIT_ROUNDS):
            text: str = self._tokenizer.decode(ids)
            again = self._tokenizer.encode(text, add_special_tokens=False).ids
            if len(again) == wanted:
                break
            missing = wanted - len(again)
            ids = again[:wanted] if missing < 0 else again + token_ids[:missing]
        return text
