"""How far a guess by n-grams can be trusted, by the length of the match."""

from __future__ import annotations

from typing import NamedTuple

_FIRST = 0.5
"""Share of right guesses that is supposed before any is known."""
_KEEP = 0.98
"""Weight that a guess of any request keeps with each later one of its size."""
_KEEP_OWN = 0.9
"""The same for a request's own guesses."""
_PRIOR_WEIGHT = 3.0
"""Guesses of its own that weigh as much, for a request, as what all requests tell."""


class Guess(NamedTuple):
    """What a request's text suggested would come next, whether it was drafted or not."""

    position: int
    token_id: int
    level: int


class Shares:
    """Shares of right guesses by level, with forgetting."""

    __slots__ = ("_right", "_total")

    def __init__(self, num_levels: int) -> None:
        self._right = [0.0] * num_levels
        self._total = [0.0] * num_levels

    def observe(self, level: int, is_right: bool, keep: float) -> None:
        """Takes the outcome of one guess."""
        self._right[level] = self._right[level] * keep + is_right
        self._total[level] = self._total[level] * keep + 1.0

    def value(self, level: int, prior: float, weight: float) -> float:
        """The share, where `prior` counts as much as `weight` guesses."""
        return (self._right[level] + weight * prior) / (self._total[level] + weight)


class Confidence:
    """Learns from every guess, for free: when its place is known, whether it was right is, too.

    Args:
        sizes: of matches, longest first; a level is an index into them.
    """

    def __init__(self, sizes: list[int]) -> None:
        self._sizes = sizes
        self._all = Shares(len(sizes))

    def shares(self) -> Shares:
        """A request's own, to begin with."""
        return Shares(len(self._sizes))

    def observe(self, own: Shares, guess: Guess, token_id: int) -> None:
        """Compares a request's guess with what came."""
        is_right = guess.token_id == token_id
        self._all.observe(guess.level, is_right, _KEEP)
        own.observe(guess.level, is_right, _KEEP_OWN)

    def num_worth(self, own: Shares, level: int, most: int, threshold: float) -> int:
        """Drafts of a match whose probability of being reached and right is at least `threshold`.

        Each draft that is right makes the match one token longer for the next.
        """
        probability, size = 1.0, self._sizes[level]
        for number in range(most):
            while level and size >= self._sizes[level - 1]:
                level -= 1
            common = self._all.value(level, _FIRST, 1.0)
            probability *= own.value(level, common, _PRIOR_WEIGHT)
            if probability < threshold:
                return number
            size += 1
        return most
