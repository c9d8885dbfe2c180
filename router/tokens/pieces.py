"""Tokens of pieces of prompts seen before: a conversation is tokenized once, not once per turn."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from worker.wire.tokenizer import SHORT_TEXT, Tokenizer

_MAX_BYTES = 32 << 20
"""Bytes of text, tokens and the objects around them: two for each character, where a piece is long
and four characters are a token."""
_ENTRY_BYTES = 170
"""Bytes of an entry besides its three parts, in CPython: a tuple of two (72 with its header for
the garbage collector), and its place in a dictionary that is just over half full (32 / 0.33)."""

Tokens = NDArray[np.int32]
"""Little-endian, as workers get them."""


class PieceMemo:
    """Tokenizes chats, whose messages are pieces that do not depend on each other.

    A conversation comes back with each turn, one message longer, and a system prompt with each
    conversation: to find what is remembered of them takes a hundredth of the time to tokenize it.
    Safe to use from several threads.

    Args:
        tokenizer: of the model.
        max_bytes: of memory for all that is remembered.
    """

    def __init__(self, tokenizer: Tokenizer, max_bytes: int = _MAX_BYTES) -> None:
        self._tokenizer = tokenizer
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._pieces: dict[tuple[str, str], bytes] = {}
        """Token ids as workers get them, by scope and text; the least recently used first."""
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
            return np.asarray(ids, "<i4")
        pieces = self._tokenizer.pieces(text)
        known = self._recall(scope, pieces)
        unknown = [piece for piece in dict.fromkeys(pieces) if piece not in known]
        for piece, ids in zip(unknown, self._tokenizer.encode_pieces(unknown), strict=True):
            known[piece] = np.asarray(ids, "<i4").tobytes()
        tokens = np.frombuffer(b"".join([known[piece] for piece in pieces]), "<i4")
        accept(len(tokens))
        self._remember(scope, known)
        return tokens

    def _recall(self, scope: str, pieces: list[str]) -> dict[str, bytes]:
        with self._lock:
            found = {piece: self._pieces.get((scope, piece)) for piece in pieces}
        return {piece: tokens for piece, tokens in found.items() if tokens is not None}

    def _remember(self, scope: str, pieces: dict[str, bytes]) -> None:
        """Takes pieces in, or back to the end of those that are forgotten."""
        with self._lock:
            for piece, tokens in pieces.items():
                key = (scope, piece)
                size = _size(key, tokens)
                if size > self._max_bytes:
                    continue  # it would leave nothing else
                if self._pieces.pop(key, None) is None:
                    self._num_bytes += size
                self._pieces[key] = tokens
            while self._num_bytes > self._max_bytes:
                oldest = next(iter(self._pieces))
                self._num_bytes -= _size(oldest, self._pieces.pop(oldest))


def _size(key: tuple[str, str], tokens: bytes) -> int:
    """Bytes of memory that an entry holds; each may hold its scope alone."""
    return _ENTRY_BYTES + sum(map(sys.getsizeof, (*key, tokens)))
