"""Stop strings, which are matched in a growing text."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Automaton for the stop strings of a request, shared by all its completions.

    A state is the longest prefix of a stop string that a text ends with (Aho and Corasick 1975).
    Each character takes amortized constant time, regardless of the number of stop strings.

    Args:
        stop: the stop strings, none of which is empty.
    """

    __slots__ = ("depths", "failures", "firsts", "matches", "moves", "texts")

    def __init__(self, stop: Sequence[str]) -> None:
        self.texts = tuple(dict.fromkeys(stop))
        self.firsts = frozenset(text[0] for text in self.texts)
        self.moves: list[dict[str, int]] = [{}]
        """Next state by character, for each state; state 0 is the empty prefix."""
        self.depths = [0]
        """Length of each state in characters."""
        self.matches: list[str | None] = [None]
        """Longest stop string that each state ends with; None if there is none."""
        for text in self.texts:
            self._add(text)
        self.failures = [0] * len(self.moves)
        """Failure link of each state: the longest other state that it ends with."""
        self._link()

    def follow(self, state: int, character: str) -> int:
        """Returns the state after one more character."""
        while (found := self.moves[state].get(character)) is None:
            if not state:
                return 0
            state = self.failures[state]
        return found

    def _add(self, text: str) -> None:
        state = 0
        for character in text:
            after = self.moves[state].setdefault(character, len(self.moves))
            if after == len(self.moves):
                self.moves.append({})
                self.depths.append(self.depths[state] + 1)
                self.matches.append(None)
            state = after
        self.matches[state] = text

    def _link(self) -> None:
        """Computes failure links and matches in breadth-first order, since a failure link leads to
        a shallower state."""
        level = [*self.moves[0].values()]
        while level:
            below = []
            for state in level:
                for character, after in self.moves[state].items():
                    failure = self.follow(self.failures[state], character)
                    self.failures[after] = failure
                    self.matches[after] = self.matches[after] or self.matches[failure]
                    below.append(after)
            level = below


class StopChecker:
    """Finds the first stop string that completes in a growing text, however the text is split.

    Text that may be the beginning of a stop string is held back. If two stop strings complete at
    the same character, the longer one wins.

    Args:
        stop: the stop strings.
        include_stop_str_in_output: whether to include the match in the text, in which case nothing
            is held back.
    """

    __slots__ = ("_held", "_include", "_state", "_stop", "matched")

    def __init__(self, stop: StopStrings, *, include_stop_str_in_output: bool = False) -> None:
        self._stop = stop
        self._include = include_stop_str_in_output
        self._state = 0
        self._held = ""
        self.matched: str | None = None
        """Stop string that ended the text; None if none matched."""

    def push(self, text: str) -> str:
        """Adds text and returns the text that may be shown. After a match, all further text is
        dropped."""
        if self.matched is not None:
            return ""
        if not self._state and self._stop.firsts.isdisjoint(text):
            return text
        end, matched = self._scan(text)
        shown = self._held + text[:end]
        if matched is not None:
            self.matched, self._held = matched, ""
            return shown if self._include else shown[: len(shown) - len(matched)]
        if self._include:
            return shown
        cut = len(shown) - self._stop.depths[self._state]
        self._held = shown[cut:]
        return shown[:cut]

    def flush(self) -> str:
        """Returns text that is still held back, for a text that ended without a match."""
        held, self._held = self._held, ""
        return held

    def _scan(self, text: str) -> tuple[int, str | None]:
        """Advances over `text` up to a match; returns the characters consumed and the match."""
        stop, state = self._stop, self._state
        for position, character in enumerate(text, start=1):
            state = stop.follow(state, character)
            if stop.matches[state] is not None:
                return position, stop.matches[state]
        self._state = state
        return len(text), None
