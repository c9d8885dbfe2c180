"""What an admission policy decides: in which order a round tries requests, and when it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import NamedTuple, Protocol


class Item(NamedTuple):
    """A waiting request as a policy sees it."""

    cost: int
    """Prompt tokens to compute: those that are cached cost nothing."""
    level: int
    """Urgency; a round tries no less urgent one before a more urgent one."""


class AdmissionPolicy(Protocol):
    """A strategy without state: `orders` what a round tries, and `stops` at a misfit or not."""

    stops: bool
    """Whether the first that does not fit ends the round."""

    def order(self, items: Sequence[Item]) -> list[int]:
        """Indices in the order of trying; levels descend."""
        ...


class Outcome(Enum):
    """What came of trying to admit one request that has tokens left for it."""

    ENTERED = auto()
    NO_PLACE = auto()
    """Slots or pages are missing."""
    WAITS = auto()
    """It is better off later, and keeps nobody back."""
    MAKING_PLACE = auto()
    """They will be there in the next step, where running requests give way."""


class TokenRoom:
    """The prompt tokens that one round may hand out, and the number of requests.

    Args:
        tokens: left for new requests.
        most: that one of them may take at first; what nobody wants is handed out afterwards.
        alone: for one that is larger than any round and goes by itself; 0 where prompts of running
            requests are under way.
        requests: most that may be admitted.
        chunked: whether part of a prompt may be computed; else all of it or nothing.
    """

    def __init__(self, *, tokens: int, most: int, alone: int, requests: int, chunked: bool) -> None:
        self.tokens = tokens
        self.requests = requests
        self.most = most
        self._alone = alone
        self._chunked = chunked

    @property
    def is_open(self) -> bool:
        """Whether anything more could be admitted."""
        return self.tokens > 0 and self.requests > 0

    def fits(self, cost: int) -> bool:
        """Whether a request may go now."""
        return self.is_open and (self._chunked or cost <= self.tokens)

    def take(self, cost: int) -> int:
        """Hands out tokens to a request that fits; how many."""
        length = min(cost, self.most, self.tokens)
        self.tokens -= length
        self.requests -= 1
        return length

    def take_alone(self, cost: int) -> int:
        """The same for one that goes by itself; 0 if it cannot."""
        length = min(cost, self._alone) if self.requests else 0
        if length:
            self.tokens = 0
            self.requests = 0
        return length


def run_round(
    policy: AdmissionPolicy,
    items: Sequence[Item],
    room: TokenRoom,
    enter: Callable[[int, bool], Outcome],
    max_drop: int = 0,
    floor: int = -1,
) -> dict[int, int]:
    """Admits by `policy`; returns index → tokens to compute now, in the order of `items`.

    Where nothing of the highest level fits into `room`, the first of it goes alone, so that it is
    not held up for ever, nor by less urgent ones.

    Args:
        policy: decides whom to try.
        items: in the order of the queue.
        room: what the step has to give.
        enter: finds slot and pages; told whether only places that others make count.
        max_drop: levels below somebody who is admitted from which on nobody else is, so that the
            step does not get longer for the urgent one; 0 for any number.
        floor: level below which nobody is admitted.
    """
    lengths: dict[int, int] = {}
    top = items[0].level if items else 0
    # It rises, too: less urgent ones may not take the pages that a more urgent one lacks.
    making_place = top_misfit = False
    for index in policy.order(items):
        cost, level = items[index]
        if level < floor or not room.is_open:
            break
        if level < top and top_misfit and not lengths and not making_place:
            break
        if not room.fits(cost):
            top_misfit = top_misfit or level == top
            if policy.stops:
                break
            continue
        outcome = enter(index, making_place)
        if outcome is Outcome.ENTERED:
            lengths[index] = room.take(cost)
            if max_drop:
                floor = max(floor, level - max_drop + 1)
        elif outcome is Outcome.WAITS:
            continue
        elif outcome is Outcome.MAKING_PLACE:
            room.take(cost)
            making_place, floor = True, level
        elif policy.stops:
            break
        else:
            floor = max(floor, level)
    if top_misfit and not lengths and not making_place:
        length = room.take_alone(items[0].cost)
        if length and enter(0, False) is Outcome.ENTERED:
            lengths[0] = length
    return {index: lengths[index] for index in sorted(lengths)}
