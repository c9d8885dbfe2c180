"""Prompt lookup: what followed the last time that the latest tokens occurred in the request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from worker.rank.speculation.base import DraftRequest, Proposer, Tokens
from worker.rank.speculation.confidence import Confidence, Guess, Shares


class NgramProposer(Proposer):
    """Looks in the request itself; costs a few microseconds and no memory to speak of.

    Good for edits, quotations and anything that repeats itself. Known as prompt lookup decoding
    (Saxena 2023) and as n-gram speculation. How much of a match is drafted follows from how often
    matches of its length were right.

    Args:
        longest: tokens that are looked for first.
        shortest: fewest tokens that count as an occurrence.
    """

    def __init__(self, longest: int, shortest: int) -> None:
        self._sizes = _sizes(longest, shortest)
        self._confidence = Confidence(self._sizes)
        self._slots: dict[int, _Slot] = {}

    def admit(self, slot: int, end_token_ids: Sequence[int] = ()) -> None:
        """See Proposer."""
        self._slots.pop(slot, None)

    def propose(self, requests: Sequence[DraftRequest], threshold: float) -> list[list[int]]:
        """See Proposer."""
        return [self._propose(request, threshold) for request in requests]

    def _propose(self, request: DraftRequest, threshold: float) -> list[int]:
        tokens = request.tokens
        slot = self._slots.get(request.slot)
        if slot is None:
            slot = _Slot(NgramIndex(self._sizes), self._confidence.shares(), [])
            self._slots[request.slot] = slot
        for guess in slot.guesses:
            self._confidence.observe(slot.shares, guess, int(tokens[guess.position]))
        slot.guesses.clear()
        slot.places.extend(tokens)
        match = slot.places.find(tokens)
        if match is None:
            return []
        slot.guesses.append(Guess(len(tokens), int(tokens[match.place]), match.level))
        number = self._confidence.num_worth(slot.shares, match.level, request.num_drafts, threshold)
        return follow(tokens, match.place, number)


class Match(NamedTuple):
    """An earlier occurrence of the latest tokens."""

    level: int
    """Of its size, among the sizes that are looked for."""
    place: int
    """Position of what followed it."""


class _Slot(NamedTuple):
    places: NgramIndex
    shares: Shares
    guesses: list[Guess]
    """The latest, until its outcome is known."""


class NgramIndex:
    """Where each n-gram of one request occurred last, for a few n.

    Each token enters once, when drafts are next asked for: O(1) per token and n.

    Args:
        sizes: of n-grams, longest first.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._longest = sizes[0]
        self._next: dict[int, dict[tuple[int, ...], int]] = {size: {} for size in sizes}
        """By n-gram: the position after its last occurrence."""
        self._indexed = 0
        """n-grams that end before this position are in, those that end at it are not."""

    def extend(self, tokens: Tokens) -> None:
        """Enters all n-grams that another token follows."""
        first = max(0, self._indexed - self._longest)
        fresh = tokens[first:-1].tolist()
        for size, places in self._next.items():
            # The first n-gram that is new ends at `indexed`; its tokens begin `size` before.
            begin = max(0, self._indexed - size)
            columns = [fresh[begin - first + place :] for place in range(size)]
            places.update(
                zip(zip(*columns, strict=False), range(begin + size, len(tokens)), strict=False)
            )
        self._indexed = len(tokens)

    def find(self, tokens: Tokens) -> Match | None:
        """Where the longest suffix occurred last; None where none did."""
        latest = tokens[-self._longest :].tolist()
        for level, (size, places) in enumerate(self._next.items()):
            place = places.get(tuple(latest[-size:]))
            if place is not None:
                return Match(level, place)
        return None


def follow(tokens: Tokens, place: int, count: int) -> list[int]:
    """`count` tokens from `place` on; beyond the end they go on as they began.

    An occurrence that overlaps the end is text that repeats itself.
    """
    found: list[int] = tokens[place : place + count].tolist()
    while len(found) < count:
        found += found[: count - len(found)]
    return found


def _sizes(longest: int, shortest: int) -> list[int]:
    """Sizes that are looked for, largest first: each half as large again as the next."""
    sizes = [shortest]
    while sizes[-1] < longest:
        sizes.append(min(longest, -(-3 * sizes[-1] // 2)))
    return sizes[::-1]
