"""Token IDs for prompts, and conversion to text for endpoints that do not support token IDs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from cluster.bench.datasets import Ids

UNKNOWN_VOCABULARY = range(100, 1000)
"""Token IDs for prompts if the tokenizer is unknown. All vocabularies contain them, and they are
rarely special tokens."""
_FIT_ROUNDS = 8
"""Maximum number of attempts to fit the length of a text."""


class PromptSpace:
    """Vocabulary of prompts: IDs of ordinary tokens, and conversion to text."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, folder: str | None) -> PromptSpace:
        """Reads `tokenizer.json` from a checkpoint's folder; if `folder` is None, the tokenizer is
        unknown.

        Raises ValueError if the folder has no such file.
        """
        if folder is None:
            return cls(None)
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"--tokenizer: no tokenizer.json in {folder}")
        return cls(Tokenizer.from_file(str(path)))

    @property
    def vocabulary(self) -> Ids:
        """IDs of ordinary tokens, ascending."""
        if self._tokenizer is None:
            return np.array(UNKNOWN_VOCABULARY, dtype=np.int64)
        added = self._tokenizer.get_added_tokens_decoder()
        size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        return np.array([i for i in range(size) if i not in added], dtype=np.int64)

    def as_text(self, token_ids: list[int]) -> str:
        """Text with as many tokens as `token_ids`, or nearly as many.

        Decoding and encoding random IDs changes their number, so the text is cut or extended until
        its length fits. Results use the server's count. Raises ValueError if the tokenizer is
        unknown.
        """
        if self._tokenizer is None:
            raise ValueError("text prompts need --tokenizer FOLDER")
        length = len(token_ids)
        ids = token_ids
        for _ in range(_FIT_ROUNDS):
            text: str = self._tokenizer.decode(ids)
            encoded = self._tokenizer.encode(text, add_special_tokens=False).ids
            missing = length - len(encoded)
            if not missing:
                break
            ids = encoded[:length] if missing < 0 else encoded + token_ids[:missing]
        return text
