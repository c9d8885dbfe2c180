"""Stop strings: where a text ends, found while it is being written."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """The stop strings of a request, prepared once for all its completions.

    Args:
        stop: the strings; none of them empty.
    """

    __slots__ = ("failures", "firsts", "texts")

    def __init__(self, stop: Sequence[str]) -> None:
        self.texts = tuple(sorted(stop, key=len, reverse=True))
        self.failures = [_failure_table(text) for text in self.texts]
        self.firsts = frozenset(text[0] for text in self.texts)


class StopChecker:
    """Finds the first stop string that completes in a growing text, however the text is cut.

    Text that may turn out to be the beginning of a stop string is held back until it is certain.
    Where two stop strings complete at the same character, the longer one wins. Each character
    costs amortised constant time per stop string (Knuth, Morris and Pratt 1977).

    Args:
        stop: the strings.
        include_stop_str_in_output: keep the match in the text; nothing is then held back.
    """

    __slots__ = ("_failures", "_firsts", "_held", "_include", "_lengths", "_stop", "matched")

    def __init__(self, stop: StopStrings, *, include_stop_str_in_output: bool = False) -> None:
        self._stop = stop.texts
        self._failures = stop.failures
        self._firsts = stop.firsts
        self._include = include_stop_str_in_output
        self._lengths = [0] * len(self._stop)
        """How much of each stop string the text ends with."""
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def push(self, text: str) -> str:
        """Adds text, returns what may be shown. After a match everything is dropped."""
        if self.matched is not None:
            return ""
        if not self._held and not any(self._lengths) and self._firsts.isdisjoint(text):
            return text
        end, matched = self._scan(text)
        shown = self._held + text[:end]
        if matched is not None:
            self.matched, self._held = matched, ""
            return shown if self._include else shown[: len(shown) - len(matched)]
        if self._include:
            return shown
        cut = len(shown) - max(self._lengths)
        self._held = shown[cut:]
        return shown[:cut]

    def flush(self) -> str:
        """What is still held back, when the text ends without a match."""
        held, self._held = self._held, ""
        return held

    def _scan(self, text: str) -> tuple[int, str | None]:
        """Advances over `text` up to a match; returns how many characters were taken, and it."""
        lengths = self._lengths
        for position, character in enumerate(text, start=1):
            for index, stop in enumerate(self._stop):
                length = lengths[index]
                failures = self._failures[index]
                while length and stop[length] != character:
                    length = failures[length - 1]
                if stop[length] == character:
                    length += 1
                if length == len(stop):
                    return position, stop
                lengths[index] = length
        return len(text), None


def _failure_table(text: str) -> list[int]:
    """For each prefix of `text`: the longest of its own prefixes that it also ends with."""
    table = [0] * len(text)
    length = 0
    for index in range(1, len(text)):
        while length and text[index] != text[length]:
            length = table[length - 1]
        if text[index] == text[length]:
            length += 1
        table[index] = length
    return table
