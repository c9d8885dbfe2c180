"""OutputParser: incremental parser of model output into reasoning, content and tool calls."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

from router.parsers.arguments import Arguments
from router.parsers.calls import Properties
from router.parsers.formats import ToolFormat
from router.parsers.thoughts import ThoughtFormat

SLICE = 4096
"""Number of characters parsed at a time; limited because the remainder is copied after each marker.
"""
MAX_BEGINNING = 2048
"""Maximum number of characters of a region before its first call's arguments."""


class Thought(NamedTuple):
    """A piece of reasoning."""

    text: str


class Content(NamedTuple):
    """A piece of the answer."""

    text: str


class Call(NamedTuple):
    """The start of a tool call, with the function's name; its arguments follow."""

    name: str


class CallArguments(NamedTuple):
    """A piece of the last call's arguments.

    Concatenated, the pieces are a JSON object, or the beginning of one if the model's text ends
    within the arguments or is malformed.
    """

    text: str


Piece = Thought | Content | Call | CallArguments


State = Literal["thought", "content", "call", "arguments", "called"]
"""State of the parser. In a region of calls, it is `call` before the arguments of a call,
`arguments` within them, and `called` after them."""
_IN_CALLS = ("call", "arguments", "called")


class OutputParser:
    """Parser of one completion. The concatenated pieces do not depend on how its text is split.

    White space next to reasoning and calls is dropped. Reasoning ends at its marker, at a call or
    at the end of the text. A call is returned when its arguments start, and each part of the
    arguments as soon as it is final. A call whose arguments cannot be parsed incrementally is
    returned when it is complete. Malformed calls, including markers, and the rest of malformed
    arguments are content.

    Args:
        thoughts: format of reasoning; None if there is none.
        is_thinking: whether the prompt ends within reasoning.
        tools: format of calls; None if calls are not parsed.
        properties: schemas of the functions' arguments.
        single_call: whether only the first call is returned.
    """

    __slots__ = (
        "_arguments",
        "_before",
        "_buffer",
        "_closing",
        "_has_content",
        "_is_after_marker",
        "_is_answer",
        "_is_leading",
        "_leading",
        "_may_mark",
        "_properties",
        "_scanned",
        "_single_call",
        "_space",
        "_state",
        "_thoughts",
        "_tools",
        "has_thoughts",
        "num_calls",
    )

    def __init__(
        self,
        *,
        thoughts: ThoughtFormat | None,
        is_thinking: bool,
        tools: ToolFormat | None,
        properties: Properties,
        single_call: bool = False,
    ) -> None:
        self._thoughts = thoughts
        self._tools = tools
        self._properties = properties
        self._leading = _leading(tools, properties)
        """First characters of texts that may consist entirely of calls, without markers."""
        self._single_call = single_call
        self._state: State = "thought" if is_thinking else "content"
        self._closing = ""
        """Closing marker of the current region; empty if there is none."""
        self._is_answer = False
        """Whether a marker has introduced the answer."""
        self._is_leading = False
        """Whether the current region is the entire text, without an opening marker."""
        self._before = ""
        """Text between the last two calls of the region."""
        self._arguments: Arguments | None = None
        """Parser of the current call's arguments."""
        marks = {marker[0] for marker in self._markers()}
        self._may_mark = re.compile(f"[{re.escape(''.join(sorted(marks)))}]" if marks else "(?!)")
        """Pattern of characters that may start a marker."""
        self._buffer = ""
        """Text that is not parsed yet: the start of a possible marker, or text within a region."""
        self._scanned = 0
        """Number of leading buffer characters in which no complete marker starts."""
        self._space = ""
        """White space at the end of the text so far, which is dropped before a marker."""
        self._has_content = False
        """Whether there has been content."""
        self._is_after_marker = is_thinking
        """Whether whitespace at the start of the next text is dropped."""
        self.num_calls = 0
        """Number of calls so far."""
        self.has_thoughts = False
        """Whether there has been reasoning."""

    def push(self, text: str) -> list[Piece]:
        """Parses more text; returns the pieces that are final so far."""
        if not self._buffer and self._is_plain(text):
            return list(self._emit(text))
        pieces: list[Piece] = []
        for start in range(0, len(text), SLICE):
            self._buffer += text[start : start + SLICE]
            pieces += self._pieces(is_end=False)
        return pieces

    def content_of(self, text: str) -> str | None:
        """A faster `push` for text that is only content, which is the common case.

        Returns the content, or None if the text may contain anything else; the text is then not
        consumed.
        """
        if self._buffer or self._is_after_marker or self._state != "content":
            return None
        if not self._is_plain(text):
            return None
        text = self._space + text
        body = text.rstrip()
        self._space = text[len(body) :]
        return body

    def end(self) -> list[Piece]:
        """Ends the text; returns the last pieces."""
        return list(self._pieces(is_end=True))

    def _is_plain(self, text: str) -> bool:
        """Whether no marker can start in the given text, so that all of it continues the current
        piece."""
        if self._state in _IN_CALLS or (self._state == "content" and not self._has_content):
            return False
        return self._may_mark.search(text) is None

    def _pieces(self, *, is_end: bool) -> Iterator[Piece]:
        while True:
            if self._begins_as_calls():
                self._state, self._closing, self._scanned = "call", "", len(self._buffer)
                self._is_leading, self._before = True, ""
            if self._arguments is not None:
                yield from self._continue_call(self._arguments)
                if self._arguments is not None:
                    break
            found = self._next_marker()
            if self._state in ("call", "called"):
                limit = found[0] if found is not None else len(self._buffer)
                if self._state == "called" and self._has_more(limit):
                    continue
                if self._state == "call" and (begun := self._begun(limit)):
                    yield from begun
                    continue
            if found is None:
                break
            start, marker = found
            if self._state in _IN_CALLS:
                yield from self._close(start, marker)
            else:
                yield from self._emit(self._buffer[:start])
                self._pass(marker, self._buffer[start:])
        if is_end:
            yield from self._end()
        elif self._state in _IN_CALLS:
            self._scanned = max(self._scanned, len(self._buffer) - self._longest())
        else:
            kept = self._num_pending()
            num_parsed = len(self._buffer) - kept
            text, self._buffer = self._buffer[:num_parsed], self._buffer[num_parsed:]
            self._scanned = 0
            yield from self._emit(text)

    def _end(self) -> Iterator[Piece]:
        """The last pieces, from the buffer at the end of the text."""
        if self._arguments is not None:
            yield from self._given(self._arguments.end())
            self._buffer = ""
        num_parsed = len(self._buffer) - (self._num_pending() if self._state == "called" else 0)
        rest, self._buffer = self._buffer[:num_parsed], ""
        is_calls = self._state in _IN_CALLS
        yield from self._region(rest, is_end=True) if is_calls else self._emit(rest)
        if self._space and not self._is_after_marker and self._state != "thought":
            yield Content(self._space)
        self._space = ""

    def _begins_as_calls(self) -> bool:
        """Whether the entire text may consist of calls without markers, judging by its first
        character."""
        return self._may_lead() and self._buffer.lstrip().startswith(self._leading)

    def _may_lead(self) -> bool:
        """Whether calls without a marker may begin here: before any content or call."""
        is_first = self._state == "content" and not self._has_content and not self.num_calls
        return is_first and bool(self._leading)

    def _watched(self) -> tuple[str, ...]:
        """Markers that are recognized in the current state."""
        if self._state in _IN_CALLS:
            if self._closing:
                return (self._closing,)
            return self._openings() if not self._is_leading else ()
        watched: tuple[str, ...] = self._openings()
        if self._tools is not None and self._state == "content":
            watched += self._tools.dropped
        if self._thoughts is not None:
            if self._state == "thought":
                watched += self._thoughts.closings
            elif self._may_begin_thought():
                watched += self._thoughts.markers
            elif self._is_answer:
                watched += self._thoughts.answer_closings
        return watched

    def _may_begin_thought(self) -> bool:
        """Whether the buffer may start with a reasoning marker and no content has been produced
        yet."""
        if self._has_content or self._thoughts is None:
            return False
        begun, markers = self._buffer.lstrip(), self._thoughts.markers
        return begun.startswith(markers) or any(marker.startswith(begun) for marker in markers)

    def _markers(self) -> tuple[str, ...]:
        """Markers that are recognized in any state."""
        markers = self._openings()
        if self._tools is not None:
            markers += self._tools.dropped
        if self._thoughts is not None:
            markers += self._thoughts.markers
        return markers

    def _openings(self) -> tuple[str, ...]:
        return () if self._tools is None else tuple(opening for opening, _ in self._tools.regions)

    def _longest(self) -> int:
        return max(map(len, self._watched()), default=1) - 1

    def _next_marker(self) -> tuple[int, str] | None:
        """Index and text of the first complete marker in the buffer; None if there is none."""
        watched = self._watched()
        if not watched:
            return None
        pattern = "|".join(map(re.escape, sorted(watched, key=len, reverse=True)))
        found = re.compile(pattern).search(self._buffer, self._scanned)
        return None if found is None else (found.start(), found[0])

    def _num_pending(self) -> int:
        """Number of characters at the end of the buffer that may start a marker."""
        if self._may_lead():
            begun = self._buffer.lstrip()
            if begun and any(leading.startswith(begun) for leading in self._leading):
                return len(self._buffer)
        watched = self._watched()
        for count in range(min(self._longest(), len(self._buffer)), 0, -1):
            if any(marker.startswith(self._buffer[-count:]) for marker in watched):
                return count
        return 0

    def _pass(self, marker: str, rest: str) -> None:
        """Sets the state after a marker. A marker that opens a region stays in the buffer."""
        closings = dict(self._tools.regions) if self._tools is not None else {}
        self._scanned = 0
        if marker not in closings or self._state == "thought":
            self._space, self._is_after_marker = "", True  # the region may turn out to be content
        self._buffer = rest.removeprefix(marker)
        if marker in closings:
            self._state, self._closing, self._buffer = "call", closings[marker], rest
            self._is_leading, self._scanned, self._before = False, len(marker), ""
        elif self._thoughts is not None and marker in self._thoughts.openings:
            self._state = "thought"
        else:
            self._state = "content"
            self._is_answer |= (
                self._thoughts is not None and marker in self._thoughts.answer_openings
            )

    def _begun(self, limit: int) -> list[Piece]:
        """Starts the call at the start of the region, if its arguments can be parsed incrementally.

        Returns the pieces to emit; empty if there is no such call.

        Args:
            limit: number of leading buffer characters known to be in the region.
        """
        tools = self._tools
        if tools is None or tools.begun is None:
            return []
        found = tools.begun.match(self._buffer, 0, min(limit, MAX_BEGINNING))
        if found is None:
            return []
        name = found[found.lastindex or 0]
        if tools.is_checked and name not in self._properties:
            return []
        self._buffer, self._scanned, self._state = self._buffer[found.end() :], 0, "arguments"
        self._space, self._is_after_marker = "", True
        self._arguments = tools.arguments(self._properties.get(name, {}))
        return list(self._called(name))

    def _continue_call(self, arguments: Arguments) -> Iterator[Piece]:
        """Parses the buffer as arguments of the current call, until they end."""
        text, self._buffer = self._buffer, ""
        yield from self._given(arguments.push(text))
        if arguments.is_over:
            self._arguments, self._buffer, self._state = None, arguments.rest, "called"

    def _has_more(self, limit: int) -> bool:
        """Starts the next call in the region of length `limit`; returns whether there is one."""
        more = self._tools.more if self._tools is not None else None
        found = more.match(self._buffer, 0, limit) if more is not None else None
        if found is None:
            return False
        self._before, self._buffer = found[0], self._buffer[found.end() :]
        self._state, self._scanned = "call", 0
        return True

    def _close(self, start: int, marker: str) -> Iterator[Piece]:
        """Ends a region with its closing marker, or before the `marker` that opens the next one."""
        end = start + len(marker) if self._closing else start
        region, rest = self._buffer[:end], self._buffer[end:]
        self._buffer, self._scanned = rest, 0
        yield from self._region(region)

    def _region(self, region: str, *, is_end: bool = False) -> Iterator[Piece]:
        """The last pieces of a region, at its end."""
        assert self._tools is not None
        is_called, self._state = self._state != "call", "content"
        if is_called:
            if not self._tools.rest.fullmatch(region.removesuffix(self._closing or "\0")):
                yield from self._emit(region)
            return
        calls = self._tools.read(region, self._properties)
        if calls is None:
            # An incomplete call at the end of the text is dropped.
            if not (self._before and is_end and not region.rstrip().endswith(("}", "]"))):
                yield from self._emit(self._before + region)
            return
        self._space, self._is_after_marker = "", True
        for call in calls:
            yield from self._called(call.name)
            yield from self._given(call.arguments)

    def _called(self, name: str) -> Iterator[Piece]:
        """Starts a call, unless it exceeds the maximum number of calls."""
        self.num_calls += 1
        if not (self._single_call and self.num_calls > 1):
            yield Call(name)

    def _given(self, arguments: str) -> Iterator[Piece]:
        """Yields a piece of the current call's arguments, unless the call exceeds the maximum
        number of calls."""
        if arguments and not (self._single_call and self.num_calls > 1):
            yield CallArguments(arguments)

    def _emit(self, text: str) -> Iterator[Piece]:
        """Reasoning or content, without whitespace next to markers."""
        body = text.rstrip()
        space = text[len(body) :]
        if not body:
            self._space += space
            return
        body = body.lstrip() if self._is_after_marker else self._space + body
        self._space, self._is_after_marker = space, False
        if self._state == "thought":
            self.has_thoughts = True
            yield Thought(body)
        else:
            self._has_content = True
            yield Content(body)


def _leading(tools: ToolFormat | None, properties: Properties) -> tuple[str, ...]:
    """First characters of texts that may consist entirely of calls, without markers."""
    if tools is None:
        return ()
    if tools.has_leading_name:
        return tuple(f"{name}\n" for name in properties)
    return (tools.leading,) if tools.leading else ()
