"""Harmony, the format of gpt-oss: messages with a header each, whose channel says what they are."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from router.replies.json_text import JsonObject
from router.replies.reader import (
    SLICE,
    Call,
    CallArguments,
    Piece,
    ReplyReader,
    Thought,
)
from worker.wire.tokenizer import Tokenizer

MAX_HEADER = 512
"""Characters that a header has at most."""
START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CONSTRAIN, END, RETURN, CALL = "<|constrain|>", "<|end|>", "<|return|>", "<|call|>"
FINAL = f"{CHANNEL}final{MESSAGE}"
"""Text before an answer."""
MARKERS = frozenset((START, CHANNEL, MESSAGE, CONSTRAIN, END, RETURN, CALL))
STOPS = (RETURN, CALL)
"""Markers at which a completion ends, besides the model's end tokens."""

_MARKER = re.compile("|".join(re.escape(marker) for marker in sorted(MARKERS)))
_LONGEST = max(map(len, MARKERS)) - 1
_ENDS = (END, RETURN, CALL)
_NAME = re.compile(r"[^<>{`\s]{1,256}")
_CHANNELS = ("analysis", "commentary", "final")

Kind = Literal["thought", "content", "call"]


class Header(NamedTuple):
    """The header of a message: what it is."""

    kind: Kind
    function: str = ""
    """Function that is called."""


class HarmonyReader:
    """Reads one completion in harmony, with the interface and the promises of `ReplyReader`.

    Analysis is thought, what is said to a function is a call of it, all else is content, the
    messages of one kind joined by line breaks. What has no sound header is content, markers
    included.

    Args:
        is_header: whether the prompt has ended where a header begins; else within an answer.
        properties: of the functions that there are.
        reads_calls: whether calls are looked for; else they are content.
        answer: reads what is content: there may be calls of another format in it.
        is_one: whether it tells the first call alone.
    """

    __slots__ = (
        "_answer",
        "_arguments",
        "_buffer",
        "_function",
        "_header",
        "_is_one",
        "_kind",
        "_num_own_calls",
        "_properties",
        "_reads_calls",
        "_space",
        "_told",
        "_wants_break",
        "has_thoughts",
    )

    def __init__(
        self,
        *,
        is_header: bool,
        properties: Mapping[str, Any],
        reads_calls: bool,
        answer: ReplyReader,
        is_one: bool = False,
    ) -> None:
        self._answer = answer
        self._is_one = is_one
        self._properties = properties
        self._reads_calls = reads_calls
        self._buffer = ""
        """Text that is not looked at yet: a marker may begin in it."""
        self._header = ""
        """Header of the message under way, while it is read."""
        self._kind: Kind | None = None if is_header else "content"
        """Kind of the message under way; None within a header."""
        self._function = ""
        """Function that is called, until its arguments begin."""
        self._arguments: JsonObject | None = None
        """Reads those of the call under way."""
        self._space = ""
        """White space that may mean nothing: around the arguments of a call."""
        self._told: set[Kind] = set()
        """Kinds of which there were messages."""
        self._wants_break = False
        """Whether the next text is the first of a message, and not the first of its kind."""
        self._num_own_calls = 0
        self.has_thoughts = False
        """Whether thoughts were told."""

    @property
    def num_calls(self) -> int:
        """Calls so far."""
        return self._num_own_calls + self._answer.num_calls

    def content_of(self, text: str) -> None:
        """Nothing: in the answer, too, a header may begin anywhere."""

    def push(self, text: str) -> list[Piece]:
        """The pieces that become certain by the next text."""
        pieces: list[Piece] = []
        for start in range(0, len(text), SLICE):
            self._buffer += text[start : start + SLICE]
            pieces += self._pieces(is_end=False)
        return pieces

    def end(self) -> list[Piece]:
        """The pieces at the end of the text."""
        pieces = list(self._pieces(is_end=True))
        if self._kind is None and self._header.strip() and not _MARKER.search(self._header):
            pieces += self._say(self._header)  # else it is a header that is cut off
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
        """Text that is no marker."""
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
            yield from self._say(self._break() + text)
        else:
            yield from self._argue(text)

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
                yield from self._say(self._header + (marker if marker != START else ""))
            self._header = START if marker == START else ""
            return
        self._header += marker
        if len(self._header) > MAX_HEADER:
            yield from self._no_header()

    def _open(self) -> Iterator[Piece]:
        """The end of a header."""
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
        self._wants_break = meant.kind in self._told
        self._told.add(meant.kind)

    def _no_header(self) -> Iterator[Piece]:
        """Takes what should be a header as content, and so what follows."""
        text, self._header = self._header, ""
        self._kind, self._wants_break = "content", False
        self._told.add("content")
        yield from self._say(text)

    def _close(self) -> Iterator[Piece]:
        """The end of a message."""
        if self._function:
            yield from self._begin(self._function)
            yield from self._given("{}")
        self._kind, self._arguments, self._header, self._space = None, None, "", ""
        self._wants_break = False

    def _argue(self, text: str) -> Iterator[Piece]:
        """More of what should be a call's arguments."""
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
        if text.strip():
            self._told.add("content")
            yield from self._say(text)
            text = ""
        self._space = text

    def _begin(self, function: str) -> Iterator[Piece]:
        """A call, unless it is one too many."""
        self._function, self._header = "", ""
        self._num_own_calls += 1
        if not (self._is_one and self._num_own_calls > 1):
            yield Call(function)

    def _given(self, arguments: str) -> Iterator[Piece]:
        if arguments and not (self._is_one and self._num_own_calls > 1):
            yield CallArguments(arguments)

    def _say(self, text: str) -> Iterator[Piece]:
        yield from self._answer.push(text) if text else ()

    def _break(self) -> str:
        """The separator of the text from the last message of its kind."""
        wanted, self._wants_break = self._wants_break, False
        return "\n" if wanted else ""


def num_thought_tokens(tokenizer: Tokenizer, token_ids: Sequence[int]) -> int:
    """Tokens of analysis, without their headers."""
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
    """Characters at the end, behind `at`, that may be the beginning of a marker."""
    begin = buffer.rfind("<", max(at, len(buffer) - _LONGEST))
    if begin < 0 or not any(marker.startswith(buffer[begin:]) for marker in MARKERS):
        return 0
    return len(buffer) - begin


def _may_be_header(text: str) -> bool:
    """Whether a header may begin so: a first one has no role, which stands in the prompt."""
    if text.startswith(START) or CHANNEL in text:
        return True
    begun = text.lstrip()
    return begun.startswith("to=") or "to=".startswith(begun)


def _read_header(text: str, properties: Mapping[str, Any]) -> Header | None:
    """The header that a text has, however it is ordered; None where it makes no sense.

    `<|start|>assistant to=functions.NAME<|channel|>commentary <|constrain|>json` is one, and so is
    what has the recipient behind the channel, or behind the type.
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
