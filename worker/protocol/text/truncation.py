"""Truncation of tokenized texts, like `truncation=True` in transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Side = Literal["left", "right"]
"""Side from which tokens are removed."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """Maximum length of a prompt, and the side from which tokens beyond it are removed."""

    maximum: int
    """Maximum number of tokens, including special tokens."""
    side: Side = "right"

    @property
    def cut(self) -> slice:
        """Slice of the tokens that remain of a prompt that was sent as token ids."""
        return slice(self.maximum) if self.side == "right" else slice(-self.maximum, None)

    def kept(self, sequences: Sequence[int | None]) -> list[int]:
        """Indices of the tokens that remain of a text, or of a pair of texts.

        Special tokens that the tokenizer has added are kept. Of a pair, the longer text is
        shortened until both have the same length, then the two are shortened equally
        (`longest_first` in transformers).

        Args:
            sequences: index of the text (0 or 1) that each token belongs to; None for an added
                special token.

        Raises:
            ValueError: the maximum leaves no room for text.
        """
        texts = [[i for i, text in enumerate(sequences) if text == one] for one in (0, 1)]
        first, second = map(len, texts)
        num_special = len(sequences) - first - second
        room = self.maximum - num_special
        if room < 1:
            raise ValueError(
                f"the text has {num_special} special tokens, which leaves no room for others: "
                f"set it to at least {num_special + 1}"
            )
        if first + second <= room:
            return list(range(len(sequences)))
        if first <= second:
            first = min(first, room // 2)
            second = room - first
        else:
            second = min(second, room // 2)
            first = room - second
        kept = {i for i, text in enumerate(sequences) if text is None}
        for indices, number in zip(texts, (first, second), strict=True):
            removed = len(indices) - number
            kept.update(indices[removed:] if self.side == "left" else indices[:number])
        return sorted(kept)
