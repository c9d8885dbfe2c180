"""Tokens of pieces of prompts seen before: a conversation is tokenized once, not once per turn."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from worker.wire.tokenizer import SHORT_TEXT, Tokenizer

_MAX_CHARACTERS = 16 << 20
"""Some 35 MB of text and tokens, where four characters are a token."""

Tokens = NDArray[np.int32]
"""Little-endian, as workers get them."""


class PieceMemo:
    """Tokenizes chats, whose messages are pieces that do not depend on each other.

    A conversation comes back with each turn, one message longer, and a system prompt with each
    conversation: to find what is remembered of them takes a hundredth of the time to tokenize it.
    Safe to use from several threads.

    Args:
        tokenizer: of the model.
        max_characters: of all that is remembered.
    """

    def __init__(self, tokenizer: Tokenizer, max_characters: int = _MAX_CHARACTERS) -> None:
        self._tokenizer = tokenizer
        self._max_characters = max_characters
        self._num_characters = 0
        self._pieces: dict[tuple[str, str], Tokens] = {}
        """By scope and text; the least recently used first."""
        self._lock = threading.Lock()

    def encode(
        self, text: str, scope: str = "", accept: Callable[[int], None] = lambda _: None
    ) -> Tokens:
        """Token ids of `text`, without the tokens that the checkpoint puts around texts.

        Args:
            text: a rendered chat.
            scope: whose it is: how long this takes tells nothing of the texts of other scopes.
            accept: called with the number of tokens; nothing is remembered of a text that it
                raises for.
        """
        if len(text) <= SHORT_TEXT:
            ids = self._tokenizer.encode(text, add_special_tokens=False)
            accept(len(ids))
            return _array(ids)
        pieces = self._tokenizer.pieces(text)
        known = self._recall(scope, pieces)
        unknown = [piece for piece in dict.fromkeys(pieces) if piece not in known]
        for piece, ids in zip(unknown, self._tokenizer.encode_pieces(unknown), strict=True):
            known[piece] = _array(ids)
        tokens = np.concatenate([known[piece] for piece in pieces])
        accept(len(tokens))
        self._remember(scope, known)
        return tokens

    def _recall(self, scope: str, pieces: list[str]) -> dict[str, Tokens]:
        with self._lock:
            found = {piece: self._pieces.get((scope, piece)) for piece in pieces}
        return {piece: tokens for piece, tokens in found.items() if tokens is not None}

    def _remember(self, scope: str, pieces: dict[str, Tokens]) -> None:
        """Takes pieces in, or back to the end of those that are forgotten."""
        with self._lock:
            for piece, tokens in pieces.items():
                if len(piece) > self._max_characters:
                    continue  # it would leave nothing else
                if self._pieces.pop((scope, piece), None) is None:
                    self._num_characters += len(piece)
                self._pieces[scope, piece] = tokens
            while self._num_characters > self._max_characters:
                oldest = next(iter(self._pieces))
                del self._pieces[oldest]
                self._num_characters -= len(oldest[1])


def _array(ids: list[int]) -> Tokens:
    return np.asarray(ids, "<i4")
