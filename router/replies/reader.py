"""What a model has written, taken apart as it comes: thoughts, content, calls of functions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from router.replies.formats import Properties, ToolCall, ToolFormat

SLICE = 4096
"""Characters that are looked at together: behind each marker the rest of them is copied."""


class Thought(NamedTuple):
    """A piece of what the model thinks before it answers."""

    text: str


class Content(NamedTuple):
    """A piece of the answer."""

    text: str


Piece = Thought | Content | ToolCall


@dataclass(frozen=True, kw_only=True, slots=True)
class ThoughtFormat:
    """How one family marks thoughts."""

    name: str
    """In `--reasoning-parser`."""
    opening: str
    closing: str


THOUGHTS = {
    made.name: made
    for made in (
        ThoughtFormat(name="think", opening="<think>", closing="</think>"),
        ThoughtFormat(name="mistral", opening="[THINK]", closing="[/THINK]"),
    )
}


def thoughts_of(template: str) -> ThoughtFormat | None:
    """How a chat template, in Jinja, marks thoughts; None where it knows none."""
    return next((made for made in THOUGHTS.values() if made.closing in template), None)


class ReplyReader:
    """Reads one completion. However its text is cut, the pieces, joined, are the same.

    White space at the borders of thoughts and calls belongs to nothing. A thought may end in its
    marker, in a call or with the text. A call is told when it is complete; what is none after all
    is content, markers included.

    Args:
        thoughts: how they are marked; None for none.
        is_thinking: whether the prompt has ended in the middle of one.
        tools: how calls are written; None to look for none.
        properties: of the functions that there are.
        is_one: whether it tells the first call alone.
    """

    __slots__ = (
        "_buffer",
        "_closing",
        "_has_content",
        "_is_after_marker",
        "_is_one",
        "_may_mark",
        "_properties",
        "_scanned",
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
        is_one: bool = False,
    ) -> None:
        self._thoughts = thoughts
        self._tools = tools
        self._properties = properties
        self._is_one = is_one
        self._state: Literal["thought", "content", "call"] = "thought" if is_thinking else "content"
        self._closing = ""
        """Of the region under way."""
        marks = {marker[0] for marker in self._markers()}
        self._may_mark = re.compile(f"[{re.escape(''.join(sorted(marks)))}]" if marks else "(?!)")
        """What a marker may begin with."""
        self._buffer = ""
        """Text that is not told yet: it may be a marker's beginning, or is in a region of calls."""
        self._scanned = 0
        """Characters of it in which no marker begins that is complete."""
        self._space = ""
        """White space that is not told yet."""
        self._has_content = False
        self._is_after_marker = is_thinking
        self.num_calls = 0
        """Calls told so far."""
        self.has_thoughts = False
        """Whether thoughts were told."""

    def push(self, text: str) -> list[Piece]:
        """The pieces that become certain by the next text."""
        if not self._buffer and self._is_plain(text):
            return list(self._tell(text))
        pieces: list[Piece] = []
        for start in range(0, len(text), SLICE):
            self._buffer += text[start : start + SLICE]
            pieces += self._pieces(is_end=False)
        return pieces

    def end(self) -> list[Piece]:
        """The pieces at the end of the text."""
        return list(self._pieces(is_end=True))

    def _is_plain(self, text: str) -> bool:
        """Whether no marker begins in the next text, which goes on with what is there."""
        if self._state == "call" or (self._state == "content" and not self._has_content):
            return False
        return self._may_mark.search(text) is None

    def _pieces(self, *, is_end: bool) -> Iterator[Piece]:
        while True:
            if self._begins_as_calls():
                self._state, self._closing, self._scanned = "call", "", len(self._buffer)
            found = self._next_marker()
            if found is None:
                break
            start, marker = found
            if self._state == "call":
                yield from self._close(start, marker)
            else:
                yield from self._tell(self._buffer[:start])
                self._pass(marker, self._buffer[start:])
        if is_end:
            rest, self._buffer = self._buffer, ""
            yield from self._calls(rest) if self._state == "call" else self._tell(rest)
            if self._space and not self._is_after_marker and self._state != "thought":
                yield Content(self._space)
            self._space = ""
        elif self._state != "call":
            kept = self._num_pending()
            told = len(self._buffer) - kept
            text, self._buffer = self._buffer[:told], self._buffer[told:]
            self._scanned = 0
            yield from self._tell(text)
        else:
            self._scanned = max(self._scanned, len(self._buffer) - self._longest())

    def _begins_as_calls(self) -> bool:
        """Whether the whole answer may be calls, by the first character of it."""
        leading = self._tools.leading if self._tools is not None else ""
        if not leading or self._state != "content" or self._has_content or self.num_calls:
            return False
        return self._buffer.lstrip().startswith(leading)

    def _watched(self) -> tuple[str, ...]:
        """Markers that mean something where the text stands."""
        if self._state == "call":
            if self._closing:
                return (self._closing,)
            return self._openings() if not self._is_leading() else ()
        watched: tuple[str, ...] = self._openings()
        if self._tools is not None and self._state == "content":
            watched += self._tools.dropped
        if self._thoughts is not None:
            if self._state == "thought":
                watched += (self._thoughts.closing,)
            elif self._may_begin_thought():
                watched += (self._thoughts.opening, self._thoughts.closing)
        return watched

    def _may_begin_thought(self) -> bool:
        """Whether nothing but white space comes before what may be a marker of thoughts."""
        if self._has_content or self._thoughts is None:
            return False
        begun = self._buffer.lstrip()
        markers = (self._thoughts.opening, self._thoughts.closing)
        return begun.startswith(markers) or any(marker.startswith(begun) for marker in markers)

    def _markers(self) -> tuple[str, ...]:
        """All that may mean something."""
        markers = self._openings()
        if self._tools is not None:
            markers += self._tools.dropped
        if self._thoughts is not None:
            markers += (self._thoughts.opening, self._thoughts.closing)
        return markers

    def _openings(self) -> tuple[str, ...]:
        return () if self._tools is None else tuple(opening for opening, _ in self._tools.regions)

    def _is_leading(self) -> bool:
        """Whether the region under way has no marker before it."""
        return not self._buffer.startswith(self._openings() or "\0")

    def _longest(self) -> int:
        return max(map(len, self._watched()), default=1) - 1

    def _next_marker(self) -> tuple[int, str] | None:
        """The first marker that is complete: where it begins, and which."""
        watched = self._watched()
        if not watched:
            return None
        start = self._scanned
        if self._state == "call":
            start = max(start, len(self._opening()))
        pattern = "|".join(map(re.escape, sorted(watched, key=len, reverse=True)))
        found = re.compile(pattern).search(self._buffer, start)
        return None if found is None else (found.start(), found[0])

    def _opening(self) -> str:
        """What the region under way begins with."""
        return next((o for o in self._openings() if self._buffer.startswith(o)), "")

    def _num_pending(self) -> int:
        """Characters at the end that may be the beginning of a marker."""
        watched = self._watched()
        for count in range(min(self._longest(), len(self._buffer)), 0, -1):
            if any(marker.startswith(self._buffer[-count:]) for marker in watched):
                return count
        return 0

    def _pass(self, marker: str, rest: str) -> None:
        """Goes on behind a marker, or at it where it opens calls."""
        closings = dict(self._tools.regions) if self._tools is not None else {}
        self._scanned = 0
        if marker not in closings or self._state == "thought":
            self._space, self._is_after_marker = "", True  # else it may be content after all
        self._buffer = rest.removeprefix(marker)
        if marker in closings:
            self._state, self._closing, self._buffer = "call", closings[marker], rest
        elif self._thoughts is not None and marker == self._thoughts.opening:
            self._state = "thought"
        else:
            self._state = "content"

    def _close(self, start: int, marker: str) -> Iterator[Piece]:
        """The calls of a region that ends with `marker`, or before it where it opens the next."""
        end = start + len(marker) if self._closing else start
        region, rest = self._buffer[:end], self._buffer[end:]
        self._buffer, self._scanned, self._state = rest, 0, "content"
        yield from self._calls(region)

    def _calls(self, region: str) -> Iterator[Piece]:
        assert self._tools is not None
        calls = self._tools.read(region, self._properties)
        self._state = "content"
        if calls is None:
            yield from self._tell(region)
            return
        self._space, self._is_after_marker = "", True
        for call in calls:
            if not (self._is_one and self.num_calls):
                self.num_calls += 1
                yield call

    def _tell(self, text: str) -> Iterator[Piece]:
        """Text that is no marker, less the white space at borders."""
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
