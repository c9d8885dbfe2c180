"""HarmonyParser: parser of harmony, the format of gpt-oss, whose messages have headers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from router.parsers.json_text import JsonObject
from router.parsers.output_parser import (
    SLICE,
    Call,
    CallArguments,
    OutputParser,
    Piece,
    Thought,
)
from worker.protocol.text.tokenizer import Tokenizer

MAX_HEADER = 512
"""Maximum length of a header in characters."""
START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CONSTRAIN, END, RETURN, CALL = "<|constrain|>", "<|end|>", "<|return|>", "<|call|>"
FINAL = f"{CHANNEL}final{MESSAGE}"
"""Header of a final answer, without its role."""
MARKERS = frozenset((START, CHANNEL, MESSAGE, CONSTRAIN, END, RETURN, CALL))
STOPS = (RETURN, CALL)
"""Markers that end a completion, besides the model's EOS tokens."""

_MARKER = re.compile("|".join(re.escape(marker) for marker in sorted(MARKERS)))
_LONGEST = max(map(len, MARKERS)) - 1
_ENDS = (END, RETURN, CALL)
_NAME = re.compile(r"[^<>{`\s]{1,256}")
_CHANNELS = ("analysis", "commentary", "final")

Kind = Literal["thought", "content", "call"]


class Header(NamedTuple):
    """The content of a message's header: what kind of message follows."""

    kind: Kind
    function: str = ""
    """Name of the called function; empty for reasoning and content."""


class HarmonyParser:
    """Parser of one completion in harmony, with the interface and guarantees of `OutputParser`.

    Messages on the analysis channel are reasoning, messages to a function are calls, and all others
    are content. Messages of the same kind are joined by line breaks. Text without a valid header is
    content, including markers.

    Args:
        is_header: whether the prompt ends within a header; otherwise it ends within an answer.
        properties: schemas of the functions' arguments.
        reads_calls: whether calls are parsed; otherwise they are content.
        answer: parser of content, which may contain calls in another format.
        single_call: whether only the first call is returned.
    """

    __slots__ = (
        "_answer",
        "_arguments",
        "_buffer",
        "_function",
        "_header",
        "_kind",
        "_kinds",
        "_needs_break",
        "_num_native_calls",
        "_properties",
        "_reads_calls",
        "_single_call",
        "_space",
        "has_thoughts",
    )

    def __init__(
        self,
        *,
        is_header: bool,
        properties: Mapping[str, Any],
        reads_calls: bool,
        answer: OutputParser,
        single_call: bool = False,
    ) -> None:
        self._answer = answer
        self._single_call = single_call
        self._properties = properties
        self._reads_calls = reads_calls
        self._buffer = ""
        """Text that is not parsed yet, since a marker may start in it."""
        self._header = ""
        """Text of the current header. Empty once the header is complete or, for a call, once its
        arguments start."""
        self._kind: Kind | None = None if is_header else "content"
        """Kind of the current message; None within a header."""
        self._function = ""
        """Name of the called function, until its arguments begin."""
        self._arguments: JsonObject | None = None
        """Parser of the current call's arguments."""
        self._space = ""
        """White space around the arguments of a call, and after text that follows them; dropped
        unless more text follows."""
        self._kinds: set[Kind] = set()
        """Kinds of messages so far."""
        self._needs_break = False
        """Whether a line break must precede the next text, because an earlier message was of the
        same kind."""
        self._num_native_calls = 0
        """Number of calls in harmony's own format."""
        self.has_thoughts = False
        """Whether there has been reasoning."""

    @property
    def num_calls(self) -> int:
        """Number of calls so far."""
        return self._num_native_calls + self._answer.num_calls

    def content_of(self, text: str) -> None:
        """Always None, since a header may begin anywhere; see OutputParser."""

    def push(self, text: str) -> list[Piece]:
        """Parses more text; returns the pieces that are final so far."""
        pieces: list[Piece] = []
        for start in range(0, len(text), SLICE):
            self._buffer += text[start : start + SLICE]
            pieces += self._pieces(is_end=False)
        return pieces

    def end(self) -> list[Piece]:
        """Ends the text; returns the last pieces."""
        pieces = list(self._pieces(is_end=True))
        if self._kind is None and self._header.strip() and not _MARKER.search(self._header):
            pieces += self._emit(self._header)  # incomplete headers are dropped, other text is not
        elif self._function:
            pieces += self._close()
        return pieces + self._answer.end()

    def _pieces(self, *, is_end: bool) -> Iterator[Piece]:
        buffer, at = self._buffer, 0
        for found in _MARKER.finditer(buffer):
            yield from self._text(buffer[at : found.start()])
            yield from self._marker(found[0])
            at = found.end()
        kept = 0 if is_end else _num_pending(buffer, at)
        self._buffer = buffer[len(buffer) - kept :]
        yield from self._text(buffer[at : len(buffer) - kept])

    def _text(self, text: str) -> Iterator[Piece]:
        """Parses text between markers."""
        if not text:
            return
        if self._kind is None:
            self._header += text
            if len(self._header) > MAX_HEADER or not _may_be_header(self._header):
                yield from self._no_header()
        elif self._kind == "thought":
            self.has_thoughts = True
            yield Thought(self._break() + text)
        elif self._kind == "content":
            yield from self._emit(self._break() + text)
        else:
            yield from self._parse_arguments(text)

    def _marker(self, marker: str) -> Iterator[Piece]:
        if self._kind is not None:
            if marker in (MESSAGE, CONSTRAIN):
                yield from self._text(marker)
                return
            yield from self._close()
            if marker in _ENDS:
                return
        elif marker == MESSAGE:
            yield from self._open()
            return
        elif marker in _ENDS or marker == START:
            if self._header.strip():
                yield from self._emit(self._header + (marker if marker != START else ""))
            self._header = START if marker == START else ""
            return
        self._header += marker
        if len(self._header) > MAX_HEADER:
            yield from self._no_header()

    def _open(self) -> Iterator[Piece]:
        """Starts a message at the end of its header."""
        header = self._header + MESSAGE
        meant = _read_header(self._header, self._properties)
        if meant is None or (meant.kind == "call" and not self._reads_calls):
            self._header = header
            yield from self._no_header()
            return
        self._kind, self._function, self._header = meant.kind, meant.function, ""
        self._space = ""
        if meant.kind == "call":
            self._header = header
            return
        self._needs_break = meant.kind in self._kinds
        self._kinds.add(meant.kind)

    def _no_header(self) -> Iterator[Piece]:
        """Treats a malformed header, and the text after it, as content."""
        text, self._header = self._header, ""
        self._kind, self._needs_break = "content", False
        self._kinds.add("content")
        yield from self._emit(text)

    def _close(self) -> Iterator[Piece]:
        """Ends a message."""
        if self._function:
            yield from self._begin(self._function)
            yield from self._given("{}")
        self._kind, self._arguments, self._header, self._space = None, None, "", ""
        self._needs_break = False

    def _parse_arguments(self, text: str) -> Iterator[Piece]:
        """Parses text where a call's arguments are expected."""
        if self._arguments is None:
            text = self._space + text
            body = text.lstrip()
            self._space = text[: len(text) - len(body)]
            if not body:
                return
            if not body.startswith("{"):
                self._header += text
                self._function = ""
                yield from self._no_header()
                return
            yield from self._begin(self._function)
            text, self._space, self._arguments = body, "", JsonObject()
        was_over = self._arguments.is_over
        if not was_over:
            yield from self._given(self._arguments.push(text))
            if not self._arguments.is_over:
                return
            text = self._arguments.rest
        text = self._space + text
        body = text.rstrip()
        self._space = text[len(body) :]
        if body:
            self._kinds.add("content")
            yield from self._emit(body)

    def _begin(self, function: str) -> Iterator[Piece]:
        """Starts a call, unless it exceeds the maximum number of calls."""
        self._function, self._header = "", ""
        self._num_native_calls += 1
        if not (self._single_call and self._num_native_calls > 1):
            yield Call(function)

    def _given(self, arguments: str) -> Iterator[Piece]:
        if arguments and not (self._single_call and self._num_native_calls > 1):
            yield CallArguments(arguments)

    def _emit(self, text: str) -> Iterator[Piece]:
        yield from self._answer.push(text) if text else ()

    def _break(self) -> str:
        """The line break between the text and the previous message of its kind, if any."""
        needed, self._needs_break = self._needs_break, False
        return "\n" if needed else ""


def num_thought_tokens(tokenizer: Tokenizer, token_ids: Sequence[int]) -> int:
    """Number of reasoning tokens: those of messages on the analysis channel, without headers."""
    channel, message = tokenizer.token_id(CHANNEL), tokenizer.token_id(MESSAGE)
    borders = {tokenizer.token_id(marker) for marker in (START, CHANNEL, *_ENDS)}
    number, begin, is_thought = 0, -1, False
    for place, token_id in enumerate(token_ids):
        if token_id == message and begin >= 0:
            header = tokenizer.decode(token_ids[begin:place], skip_special_tokens=False)
            is_thought, begin = header.split()[:1] == ["analysis"] and "to=" not in header, -1
        elif token_id in borders:
            is_thought, begin = False, place + 1 if token_id == channel else -1
        elif is_thought:
            number += 1
    return number


def _num_pending(buffer: str, at: int) -> int:
    """Number of characters at the end of the buffer, after `at`, that may start a marker."""
    begin = buffer.rfind("<", max(at, len(buffer) - _LONGEST))
    if begin < 0 or not any(marker.startswith(buffer[begin:]) for marker in MARKERS):
        return 0
    return len(buffer) - begin


def _may_be_header(text: str) -> bool:
    """Whether a text may start a header. The first header's role is part of the prompt."""
    if text.startswith(START) or CHANNEL in text:
        return True
    begun = text.lstrip()
    return begun.startswith("to=") or "to=".startswith(begun)


def _read_header(text: str, properties: Mapping[str, Any]) -> Header | None:
    """Parses a header; None if it is malformed.

    The recipient of `<|start|>assistant to=functions.NAME<|channel|>commentary <|constrain|>json`
    may also follow the channel or the type.
    """
    role, marker, rest = text.removeprefix(START).partition(CHANNEL)
    words = (role + " " + rest.replace(CONSTRAIN, " ")).split()
    if words[:1] == ["assistant"] and text.startswith(START):
        del words[0]
    recipients = [word.removeprefix("to=") for word in words if word.startswith("to=")]
    words = [word for word in words if not word.startswith("to=")]
    if (
        len(recipients) > 1
        or CHANNEL in rest
        or (bool(marker) and words[:1] not in [[c] for c in _CHANNELS])
        or len(words) > 2
    ):
        return None
    if recipients:
        name = recipients[0].removeprefix("functions.")
        is_function = recipients[0].startswith("functions.") or name in properties
        return Header("call", name) if is_function and _NAME.fullmatch(name) else None
    if not marker and words:
        return None
    return Header("thought" if words[:1] == ["analysis"] else "content")
