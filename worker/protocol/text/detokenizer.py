"""Incremental detokenization: token ids to text, and the stop strings that end it."""

from __future__ import annotations

import codecs
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import tokenizers

from worker.protocol.text.stop import StopChecker, StopStrings

MAX_HELD_TOKENS = 8
"""Tokens held back for an unfinished character: none spans more, so that more are no text."""

CONTEXT_TOKENS = 2
"""Minimum number of earlier tokens to decode a token with. Decoders look at one (whether a token is
the first, or repeats the last); more are kept where two tokens do not decode as within the text."""

TRIM_TOKENS = 6
"""Context length at which it is cut to CONTEXT_TOKENS: a decode of so many tokens takes 6 µs."""

MAX_CONTEXT_TOKENS = 32
"""Context length at which it is cut even if the rest alone decodes to another text."""

CHARACTER_TOKENS = 4
"""Maximum number of tokens of a character: a byte of UTF-8 each."""

REPLACEMENT = "\ufffd"
"""Character that decoders write for bytes that are not UTF-8."""


class Detokenizer(ABC):
    """Detokenizer of one completion, fed as its tokens arrive.

    All pieces joined, that of `flush` included, are what the completion adds to the text of its
    prompt: the decoded sequence of both, less the decoded prompt. A piece never ends within a
    character: its first bytes wait for the tokens that complete it. The completion of a prompt that
    ends within a character begins with that character.
    """

    @abstractmethod
    def push(self, token_ids: Sequence[int]) -> str:
        """Adds tokens, returns the text that became certain."""

    @abstractmethod
    def flush(self) -> str:
        """The rest at the end; an unfinished character becomes U+FFFD."""


class Pending(NamedTuple):
    """Unfinished character at the end of a sequence of tokens."""

    data: bytes
    """First bytes of the character; empty for none."""
    num_tokens: int
    """Number of last tokens that the bytes are of."""
    text: str
    """Characters of those tokens before the unfinished one."""


NOTHING_PENDING = Pending(b"", 0, "")


class ByteDetokenizer(Detokenizer):
    """Detokenizer for byte-level vocabularies (GPT-2, Llama 3, Qwen): a token is a run of bytes.

    Exact for any sequence of tokens, in constant time per token.

    Args:
        backend: the `tokenizers` object.
        token_bytes: bytes by token id, filled as tokens appear; shared by all completions that
            agree in `skip_special_tokens` and `shown`.
        skip_special_tokens: whether special tokens yield no text.
        shown: special tokens that yield their names even so.
        pending: unfinished character at the end of the prompt.
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
    """Detokenizer for all other vocabularies: decodes each token together with those before it.

    Exact for decoders of which the text of a sequence begins with that of its first tokens. If a
    token changes the text of earlier ones (invalid bytes in a run of byte tokens, replacements
    across tokens), that text stays, and what follows is decoded by itself.

    Args:
        backend: the `tokenizers` object.
        context: last tokens of the prompt.
        pending: unfinished character at the end of `context`.
        skipped: ids of tokens that have no text; None to decode special tokens.
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
        """Context, then the tokens that are held back."""
        self._num_held = 0
        """Number of tokens at the end of the window whose text is not certain."""
        self._before = ""
        """Text of the context."""
        if context:
            self._begin_after(context, pending)

    def push(self, token_ids: Sequence[int]) -> str:
        """Adds tokens, returns the text that became certain."""
        return "".join([self._push_one(token_id) for token_id in token_ids])

    def flush(self) -> str:
        """The rest at the end; an unfinished character becomes U+FFFD."""
        return self._advance(is_end=True) if self._num_held else ""

    def _begin_after(self, context: Sequence[int], pending: Pending) -> None:
        """Sets the window to the last tokens of a prompt, from the beginning of a character on."""
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
        """The text of the tokens that are held back, unless it may change and `is_end` is not
        set."""
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
        """Cuts the window to the fewest last tokens that decode to the end of its text."""
        size = len(self._window)
        for kept in range(CONTEXT_TOKENS, size):
            text = self._decode(self._window[-kept:])
            if (text and self._before.endswith(text)) or size > MAX_CONTEXT_TOKENS:
                self._window, self._before = self._window[-kept:], text
                return

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=self._skipped is not None)


class RequestText:
    """Detokenizer and stop strings of one completion together.

    Args:
        detokenizer: a fresh one of the completion's model.
        stop: stop strings; None for none.
        include_stop_str_in_output: whether the text keeps the stop string that ended it.
        min_tokens: number of tokens in whose text stop strings do not count.
        with_offsets: whether `offsets` are kept.
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
        self._length = 0
        """Characters of the text so far, held ones included."""
        self._num_shown = 0
        """Characters of the text that has been returned."""
        self.num_tokens = 0
        """Tokens taken so far, without those after a matched stop string."""
        self.offsets: list[int] | None = [] if with_offsets else None
        """Index in the text at which the text of each token begins, which ends where that of the
        next one begins; None if they are not kept. A character of several tokens is the text of the
        last of them. Tokens of a stop string that the text does not keep are at its end."""

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
                # An unfinished character belongs to the token before.
                pieces.append(self._show(self._detokenizer.flush()))
                self.offsets.append(self._num_shown if self.stop_reason else self._length)
        return "".join(pieces)

    def flush(self) -> str:
        """Text that was held back, once the completion has ended without a stop string."""
        text = self._detokenizer.flush()
        if self._checker is None:
            return text
        return self._checker.push(text) + self._checker.flush()

    def _show(self, text: str) -> str:
        """The part of new text that may be shown."""
        self._length += len(text)
        if self._checker is not None and self.num_tokens > self._min_tokens:
            text = self._checker.push(text)
        self._num_shown += len(text)
        if self.stop_reason is not None and self.offsets is not None:
            for place in range(len(self.offsets) - 1, -1, -1):
                if self.offsets[place] <= self._num_shown:
                    break
                self.offsets[place] = self._num_shown
        return text


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


def pending_of(pieces: Sequence[bytes]) -> Pending:
    """Unfinished character at the end of a sequence, of whose last CHARACTER_TOKENS tokens these
    are the bytes."""
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
    """Bytes by character in GPT-2's alphabet: printable Latin-1 stands for itself, other bytes are
    characters from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return table


_BYTE_OF_CHARACTER = _byte_of_character()
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
