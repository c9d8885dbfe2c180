"""Incremental detokenization of token ids to text, with stop strings."""

from __future__ import annotations

import codecs
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import tokenizers

from worker.protocol.text.stop import StopChecker, StopStrings

MAX_HELD_TOKENS = 8
"""Maximum number of tokens held back for an incomplete character; no valid character needs more."""

CONTEXT_TOKENS = 2
"""Minimum number of preceding tokens with which a token is decoded. Its text depends on whether
there is a preceding token, and whether the token repeats it. More are used if the last
CONTEXT_TOKENS tokens would decode to different text without those before them."""

TRIM_TOKENS = 6
"""Context length in tokens at which the context is cut to CONTEXT_TOKENS. Decoding this many tokens
takes 6 µs."""

MAX_CONTEXT_TOKENS = 32
"""Context length in tokens at which the context is cut even if the rest then decodes to different
text."""

CHARACTER_TOKENS = 4
"""Maximum number of tokens per character: one for each of its UTF-8 bytes."""

REPLACEMENT = "\ufffd"
"""Character that decoders emit for invalid UTF-8."""


class Detokenizer(ABC):
    """Incremental detokenizer of one completion.

    The results of `push` and `flush`, joined, are the text that the completion adds to its prompt:
    the decoded text of prompt and completion together, without the decoded prompt. A result never
    ends within a character: the character's first bytes are held back until the remaining tokens
    arrive. If the prompt ends within a character, the completion begins with that character.
    """

    @abstractmethod
    def push(self, token_ids: Sequence[int]) -> str:
        """Adds tokens and returns the text that is now final."""

    @abstractmethod
    def flush(self) -> str:
        """Returns the remaining text at the end. An incomplete character becomes U+FFFD."""


class Pending(NamedTuple):
    """Incomplete character at the end of a token sequence."""

    data: bytes
    """First bytes of the character; empty if there is none."""
    num_tokens: int
    """Number of trailing tokens that contain the bytes `data`."""
    text: str
    """Text of the last `num_tokens` tokens before the incomplete character."""


NOTHING_PENDING = Pending(b"", 0, "")


class ByteDetokenizer(Detokenizer):
    """Detokenizer for byte-level vocabularies (GPT-2, Llama 3, Qwen), whose tokens are bytes.

    Exact for any sequence of tokens, in constant time per token.

    Args:
        backend: the `tokenizers` object.
        token_bytes: bytes by token id, filled on demand; shared by all completions with the same
            `skip_special_tokens` and `shown`.
        skip_special_tokens: whether special tokens are omitted.
        shown: special tokens that are never omitted.
        pending: incomplete character at the end of the prompt.
    """

    __slots__ = ("_backend", "_held", "_shown", "_skip_special_tokens", "_token_bytes")

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        token_bytes: dict[int, bytes],
        *,
        skip_special_tokens: bool,
        shown: frozenset[str] = frozenset(),
        pending: Pending = NOTHING_PENDING,
    ) -> None:
        self._backend = backend
        self._shown = shown
        self._token_bytes = token_bytes
        self._skip_special_tokens = skip_special_tokens
        self._held = pending.data
        """First bytes of an incomplete character."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Adds tokens and returns the text that is now final."""
        known = self._token_bytes
        pieces = [self._held]
        for token_id in token_ids:
            piece = known.get(token_id)
            if piece is None:
                piece = known[token_id] = self._bytes_of(token_id)
            pieces.append(piece)
        data = b"".join(pieces)
        # Same as codecs' incremental decoder, without its overhead per token.
        text, num_bytes = codecs.utf_8_decode(data, "replace", False)
        self._held = data[num_bytes:]
        return text

    def flush(self) -> str:
        """Returns the remaining text at the end. An incomplete character becomes U+FFFD."""
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
    """Detokenizer for all other vocabularies: decodes each token together with preceding ones.

    Exact for decoders for which the text of a sequence begins with the text of any of its prefixes.
    If a token changes the text of earlier ones (invalid bytes in a run of byte tokens, replacements
    across tokens), that text is kept, and the following text is decoded separately.

    Args:
        backend: the `tokenizers` object.
        context: last tokens of the prompt.
        pending: incomplete character at the end of `context`.
        skipped: ids of tokens without text; None to decode special tokens.
    """

    __slots__ = ("_backend", "_before", "_num_held", "_skipped", "_window")

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        context: Sequence[int] = (),
        pending: Pending = NOTHING_PENDING,
        skipped: frozenset[int] | None = None,
    ) -> None:
        self._backend = backend
        self._skipped = skipped
        self._window: list[int] = []
        """Tokens of the context, followed by the tokens held back."""
        self._num_held = 0
        """Number of tokens at the end of the window whose text is not final."""
        self._before = ""
        """Text of the context."""
        if context:
            self._begin_after(context, pending)

    def push(self, token_ids: Sequence[int]) -> str:
        """Adds tokens and returns the text that is now final."""
        return "".join([self._push_one(token_id) for token_id in token_ids])

    def flush(self) -> str:
        """Returns the remaining text at the end. An incomplete character becomes U+FFFD."""
        return self._advance(is_end=True) if self._num_held else ""

    def _begin_after(self, context: Sequence[int], pending: Pending) -> None:
        """Sets the window to the last tokens of a prompt, starting at a character boundary."""
        for first in range(max(len(context) - TRIM_TOKENS, 0), -1, -1):
            if first == 0 or not self._decode(context[first:]).startswith(REPLACEMENT):
                context = context[first:]
                break
        self._window, self._num_held = list(context), pending.num_tokens
        self._before = self._decode(context[: len(context) - pending.num_tokens]) + pending.text

    def _push_one(self, token_id: int) -> str:
        if self._skipped is not None and token_id in self._skipped:
            return ""
        self._window.append(token_id)
        self._num_held += 1
        return self._advance(is_end=self._num_held > MAX_HELD_TOKENS)

    def _advance(self, *, is_end: bool) -> str:
        """Returns the text of the tokens held back, or nothing if it may still change and `is_end`
        is not set."""
        text = self._decode(self._window)
        if not is_end and text.endswith(REPLACEMENT):
            return ""
        if text.startswith(self._before):
            if not is_end and len(text) == len(self._before):
                return ""
            piece = text[len(self._before) :]
        else:
            self._window = self._window[-self._num_held :]
            piece = text = self._decode(self._window)
        self._before, self._num_held = text, 0
        if len(self._window) >= TRIM_TOKENS:
            self._trim()
        return piece

    def _trim(self) -> None:
        """Reduces the window to its shortest suffix of at least CONTEXT_TOKENS tokens that decodes
        to the end of the window's text."""
        size = len(self._window)
        for kept in range(CONTEXT_TOKENS, size):
            text = self._decode(self._window[-kept:])
            if (text and self._before.endswith(text)) or size > MAX_CONTEXT_TOKENS:
                self._window, self._before = self._window[-kept:], text
                return

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=self._skipped is not None)


class RequestText:
    """Detokenizes one completion and matches its stop strings.

    Args:
        detokenizer: new detokenizer of the model.
        stop: stop strings; None if there are none.
        include_stop_str_in_output: whether the text includes the matched stop string.
        min_tokens: number of initial tokens in which stop strings are ignored.
        with_offsets: whether to record `offsets`.
    """

    __slots__ = (
        "_checker",
        "_detokenizer",
        "_include",
        "_length",
        "_min_tokens",
        "_num_shown",
        "num_tokens",
        "offsets",
        "stop_reason",
    )

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        stop: StopStrings | None = None,
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
        with_offsets: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._checker: StopChecker | None = None
        if stop is not None and stop.texts:
            self._checker = StopChecker(stop, include_stop_str_in_output=include_stop_str_in_output)
        self._include = include_stop_str_in_output
        self._min_tokens = min_tokens
        self.stop_reason: str | None = None
        """Stop string that ended the text; None if none matched."""
        self._length = 0
        """Number of characters of the text so far, including those held back."""
        self._num_shown = 0
        """Number of characters of the text returned so far."""
        self.num_tokens = 0
        """Number of tokens received so far, excluding those after a matched stop string."""
        self.offsets: list[int] | None = [] if with_offsets else None
        """Start index in the text of each token, which is the end index of the previous one; None
        if not recorded. A character of several tokens belongs to the last of them. Tokens of an
        omitted stop string are at the end of the text."""

    def push(self, token_ids: Sequence[int], *, stopped: bool = False) -> str:
        """Adds tokens and returns new text; empty after a stop string has matched.

        With `stopped`, the last token is the one that ended the completion. It is counted, but its
        text is only included with `include_stop_str_in_output`.
        """
        shown = token_ids[:-1] if stopped and not self._include else token_ids
        if self._checker is None and self.offsets is None:
            self.num_tokens += len(token_ids)
            return self._detokenizer.push(shown)
        pieces: list[str] = []
        for token_id in shown:
            self.num_tokens += 1
            if self.offsets is not None:
                self.offsets.append(self._length)
            pieces.append(self._show(self._detokenizer.push((token_id,))))
            if self.stop_reason is not None:
                return "".join(pieces)
        if len(shown) < len(token_ids):
            self.num_tokens += 1
            if self.offsets is not None:
                # An incomplete character belongs to the previous token.
                pieces.append(self._show(self._detokenizer.flush()))
                self.offsets.append(self._num_shown if self.stop_reason else self._length)
        return "".join(pieces)

    def flush(self) -> str:
        """Returns text that was held back, for a completion that ended without a stop string."""
        text = self._detokenizer.flush()
        if self._checker is None:
            return text
        text = self._checker.push(text) + self._checker.flush()
        self.stop_reason = self._checker.matched
        return text

    def _show(self, text: str) -> str:
        """Records new text; returns the text that may be shown, including text held back before."""
        self._length += len(text)
        if self._checker is not None and self.num_tokens > self._min_tokens:
            text = self._checker.push(text)
            self.stop_reason = self._checker.matched
        self._num_shown += len(text)
        if self.stop_reason is not None and self.offsets is not None:
            for place in range(len(self.offsets) - 1, -1, -1):
                if self.offsets[place] <= self._num_shown:
                    break
                self.offsets[place] = self._num_shown
        return text


def bytes_of_token(backend: tokenizers.Tokenizer, token_id: int, *, byte_level: bool) -> bytes:
    """Bytes of one token in isolation; empty for ids without a token (embedding padding).

    Args:
        backend: the `tokenizers` object.
        token_id: id of the token.
        byte_level: whether token names use GPT-2's alphabet; otherwise SentencePiece's.
    """
    token = backend.id_to_token(token_id)
    if token is None:
        return b""
    if byte_level:
        try:
            return bytes([_BYTE_OF_CHARACTER[character] for character in token])
        except KeyError:
            return token.encode()  # an added token, whose name is its text
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode()


def pending_of(pieces: Sequence[bytes]) -> Pending:
    """Incomplete character at the end of a token sequence, given the bytes of each of its last
    CHARACTER_TOKENS tokens."""
    data = b"".join(pieces)
    _, num_bytes = codecs.utf_8_decode(data, "replace", False)
    rest = data[num_bytes:]
    num_tokens = size = 0
    while size < len(rest):
        num_tokens += 1
        size += len(pieces[-num_tokens])
    text = data[len(data) - size : num_bytes].decode(errors="replace")
    return Pending(rest, num_tokens, text)


def _byte_of_character() -> dict[str, int]:
    """Bytes by character of GPT-2's alphabet: printable Latin-1 characters represent themselves,
    and the characters starting at code point 256 represent all other bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return table


_BYTE_OF_CHARACTER = _byte_of_character()
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
