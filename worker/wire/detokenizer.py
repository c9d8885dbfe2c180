"""Incremental detokenization: token ids to text, and the stop strings that end it."""

from __future__ import annotations

import codecs
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence

import tokenizers
from tokenizers.decoders import DecodeStream

from worker.wire.stop import StopChecker, StopStrings

MAX_HELD_TOKENS = 8
"""Tokens held back for an unfinished character: none spans more, so that more are no text."""

CONTEXT_TOKENS = 6
"""Tokens of context on which the text of the next ones depends (leading space, joined pieces)."""


class Detokenizer(ABC):
    """Detokenizer of one completion, fed as its tokens arrive.

    All pieces joined, that of `flush` included, are the decoded sequence. A piece never ends within
    a character: its first bytes wait for the tokens that complete it.
    """

    @abstractmethod
    def push(self, token_ids: Sequence[int]) -> str:
        """Adds tokens, returns the text that became certain."""

    @abstractmethod
    def flush(self) -> str:
        """The rest at the end; an unfinished character becomes U+FFFD."""


class ByteDetokenizer(Detokenizer):
    """Detokenizer for byte-level vocabularies (GPT-2, Llama 3, Qwen): a token is a run of bytes.

    Exact for any sequence of tokens, in constant time per token.

    Args:
        backend: the `tokenizers` object.
        token_bytes: bytes by token id, filled as tokens appear; shared by all completions that
            agree in `skip_special_tokens` and `shown`.
        skip_special_tokens: whether special tokens yield no text.
        shown: special tokens that yield their names even so.
    """

    __slots__ = ("_backend", "_held", "_shown", "_skip_special_tokens", "_token_bytes")

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        token_bytes: dict[int, bytes],
        *,
        skip_special_tokens: bool,
        shown: frozenset[str] = frozenset(),
    ) -> None:
        self._backend = backend
        self._shown = shown
        self._token_bytes = token_bytes
        self._skip_special_tokens = skip_special_tokens
        self._held = b""
        """First bytes of a character that is not complete yet."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Adds tokens, returns the text that became certain."""
        known = self._token_bytes
        pieces = [self._held]
        for token_id in token_ids:
            piece = known.get(token_id)
            if piece is None:
                piece = known[token_id] = self._bytes_of(token_id)
            pieces.append(piece)
        data = b"".join(pieces)
        # As codecs' incremental decoder does it, without its frame for each token.
        text, num_bytes = codecs.utf_8_decode(data, "replace", False)
        self._held = data[num_bytes:]
        return text

    def flush(self) -> str:
        """The rest at the end; an unfinished character becomes U+FFFD."""
        text, _ = codecs.utf_8_decode(self._held, "replace", True)
        self._held = b""
        return text

    def _bytes_of(self, token_id: int) -> bytes:
        skip = self._skip_special_tokens
        if skip and not self._backend.decode([token_id], skip_special_tokens=True):
            name = self._backend.id_to_token(token_id)
            return name.encode() if name in self._shown else b""
        return bytes_of_token(self._backend, token_id, byte_level=True)


class StreamDetokenizer(Detokenizer):
    """Detokenizer for all other vocabularies, by the library's own decode stream."""

    __slots__ = ("_backend", "_context", "_held", "_skip_special_tokens", "_stream")

    def __init__(self, backend: tokenizers.Tokenizer, *, skip_special_tokens: bool) -> None:
        self._backend = backend
        self._skip_special_tokens = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._context: list[int] = []
        self._held: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        """Adds tokens, returns the text that became certain."""
        return "".join([self._push_one(token_id) for token_id in token_ids])

    def flush(self) -> str:
        """The rest at the end; an unfinished character becomes U+FFFD."""
        if not self._held:
            return ""
        before = self._decode(self._context)
        text = self._decode(self._context + self._held)
        self._remember()
        self._stream = DecodeStream(self._context, self._skip_special_tokens)
        return text[len(before) :]

    def _push_one(self, token_id: int) -> str:
        self._held.append(token_id)
        try:
            piece = self._stream.step(self._backend, token_id)
        except Exception:
            # The library gives up where a token changes how earlier ones decode.
            return self.flush()
        if piece is None:
            return self.flush() if len(self._held) > MAX_HELD_TOKENS else ""
        self._remember()
        return piece

    def _remember(self) -> None:
        self._context = (self._context + self._held)[-CONTEXT_TOKENS:]
        self._held = []

    def _decode(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


class RequestText:
    """Detokenizer and stop strings of one completion together.

    Args:
        detokenizer: a fresh one of the completion's model.
        stop: stop strings; None for none.
        include_stop_str_in_output: whether the text keeps the stop string that ended it.
        min_tokens: number of tokens in whose text stop strings do not count.
    """

    __slots__ = ("_checker", "_detokenizer", "_include", "_min_tokens", "num_tokens")

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        stop: StopStrings | None = None,
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = detokenizer
        self._checker: StopChecker | None = None
        if stop is not None and stop.texts:
            self._checker = StopChecker(stop, include_stop_str_in_output=include_stop_str_in_output)
        self._include = include_stop_str_in_output
        self._min_tokens = min_tokens
        self.num_tokens = 0
        """Tokens taken so far, without those after a matched stop string."""

    @property
    def stop_reason(self) -> str | None:
        """Stop string that ended the text; None while none did."""
        return None if self._checker is None else self._checker.matched

    def push(self, token_ids: Sequence[int], *, stopped: bool = False) -> str:
        """Adds tokens, returns the text that may be shown; empty after a stop string has matched.

        With `stopped` the last token is the one that ended the completion: it counts, but has text
        only with `include_stop_str_in_output`.
        """
        shown = token_ids[:-1] if stopped and not self._include else token_ids
        if self._checker is None:
            self.num_tokens += len(token_ids)
            return self._detokenizer.push(shown)
        pieces: list[str] = []
        for token_id in shown:
            self.num_tokens += 1
            text = self._detokenizer.push((token_id,))
            if self.num_tokens > self._min_tokens:
                text = self._checker.push(text)
            pieces.append(text)
            if self._checker.matched is not None:
                return "".join(pieces)
        self.num_tokens += len(token_ids) - len(shown)
        return "".join(pieces)

    def flush(self) -> str:
        """Text that was held back, once the completion has ended without a stop string."""
        text = self._detokenizer.flush()
        if self._checker is None:
            return text
        return self._checker.push(text) + self._checker.flush()


def bytes_of_token(backend: tokenizers.Tokenizer, token_id: int, *, byte_level: bool) -> bytes:
    """Bytes of one token by itself, whatever stands around it; empty for an id that names no token
    (padding rows of the embedding).

    Args:
        backend: the `tokenizers` object.
        token_id: id of the token.
        byte_level: whether names are spelled in GPT-2's alphabet, else in SentencePiece's.
    """
    token = backend.id_to_token(token_id)
    if token is None:
        return b""
    if byte_level:
        try:
            return bytes([_BYTE_OF_CHARACTER[character] for character in token])
        except KeyError:
            return token.encode()  # an added token, spelled as it is
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode()


def _byte_of_character() -> dict[str, int]:
    """Bytes by character in GPT-2's alphabet: printable Latin-1 stands for itself, other bytes are
    characters from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return table


_BYTE_OF_CHARACTER = _byte_of_character()
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
