"""What two flags decide. `--schedule-policy`: the order of the queue among equally urgent requests;
`--prefill-admission-policy`: in which order a round tries them, and when it ends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from types import MappingProxyType
from typing import Final, NamedTuple

from worker.wire.admission import AdmissionPolicyName, SchedulePolicy


class Item(NamedTuple):
    """A waiting request as a policy sees it."""

    cost: int
    """Prompt tokens to compute: those that are cached cost nothing."""
    level: int
    """Urgency; a round tries no less urgent one before a more urgent one."""
    num_tokens: int
    """All tokens that are known of it, cached or not: its prompt, and what it has generated where
    it was preempted."""


class QueueOrder(NamedTuple):
    """An order of equally urgent requests, other than first come, first served.

    To add one: its entry in `ORDERS`, and its name in `worker.wire.admission`.
    """

    key: Callable[[Item], float]
    """The least goes first; ties as they come."""
    max_queue: int
    """Where more wait, all go as they come: to order them would take longer than it gains."""

    def order(self, items: Sequence[Item]) -> list[int]:
        """Indices in the order of the queue; levels descend."""
        return _ordered(items, self.key)


ORDERS: Final[Mapping[SchedulePolicy, QueueOrder | None]] = MappingProxyType(
    {
        "fcfs": None,
        "lpm": QueueOrder(key=lambda item: item.cost - item.num_tokens, max_queue=128),
    }
)
"""By the name that `--schedule-policy` has for it. lpm puts those first of which most tokens are
cached; its bound is SGLang's."""


class AdmissionPolicy(NamedTuple):
    """In which order a round tries equally urgent requests, and whether it stops at a misfit.

    To add one: its entry in `POLICIES`, and its name in `worker.wire.admission`.
    """

    stops: bool
    """Whether the first that does not fit ends the round; it then sees no more of the queue than
    could enter, else `prefill_admission_lookahead` requests."""
    key: Callable[[Item], float] | None = None
    """The least goes first; ties as they come. None for the order of the queue."""

    def order(self, items: Sequence[Item]) -> list[int]:
        """Indices in the order of trying; levels descend."""
        return list(range(len(items))) if self.key is None else _ordered(items, self.key)

    def in_turn(self, items: Sequence[Item], tenants: Sequence[str]) -> list[int]:
        """Indices in the order of trying where several tenants wait, each of which keeps its turns
        in the queue.

        Args:
            items: in the order of the queue, which gives tenants their turns.
            tenants: whose each of them is.
        """
        turns: dict[tuple[int, str], list[int]] = defaultdict(list)
        for index, (item, tenant) in enumerate(zip(items, tenants, strict=True)):
            turns[item.level, tenant].append(index)
        ordered = list(range(len(items)))
        for own in turns.values():
            for turn, index in zip(own, self.order([items[i] for i in own]), strict=True):
                ordered[turn] = own[index]
        return ordered


POLICIES: Final[Mapping[AdmissionPolicyName, AdmissionPolicy]] = MappingProxyType(
    {
        "fifo": AdmissionPolicy(stops=True),
        "pack": AdmissionPolicy(stops=False, key=lambda item: item.cost),
    }
)
"""By the name that `--prefill-admission-policy` has for it. What fits by ascending cost, as pack
tries, is the largest number of requests that fit at all, and of these choices the cheapest."""


def _ordered(items: Sequence[Item], key: Callable[[Item], float]) -> list[int]:
    return sorted(range(len(items)), key=lambda i: (-items[i].level, key(items[i]), i))


class Outcome(Enum):
    """What came of trying to admit one request that has tokens left for it."""

    ENTERED = auto()
    NO_CAPACITY = auto()
    """Slots or pages are missing."""
    WAITS = auto()
    """The request is better off later, and keeps nobody back."""
    PREEMPTING = auto()
    """They will be there in the next step, where running requests give way."""


class StepHeadroom:
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
        """Hands out tokens to a request that has the step for itself; 0 if it cannot."""
        length = min(cost, self._alone) if self.requests else 0
        if length:
            self.tokens = 0
            self.requests = 0
        return length


class AdmissionRound:
    """Chooses whom to try next, and hands tokens to those that entered: `next`, try, `report`,
    `next` …

    Where nothing of the highest level fits into the headroom, the first of it goes alone, so that
    it is not held up for ever, nor by less urgent ones.

    Args:
        policy: decides whom to try.
        items: in the order of the queue.
        headroom: what the step has to give.
        max_drop: levels below somebody who is admitted from which on nobody else is, so that the
            step does not get longer for the urgent one; 0 for any number.
        floor: level below which nobody is admitted.
    """

    def __init__(
        self,
        policy: AdmissionPolicy,
        items: Sequence[Item],
        headroom: StepHeadroom,
        max_drop: int = 0,
        floor: int = -1,
    ) -> None:
        self.is_preempting = False
        """Whether running requests give way to one that was tried: only slots that others free
        count from then on, and less urgent ones may not take what it lacks."""
        self._stops = policy.stops
        self._items = items
        self._headroom = headroom
        self._max_drop = max_drop
        self._floor = floor
        """Rises, too: less urgent ones may not take the pages that a more urgent one lacks."""
        self._left = iter(policy.order(items))
        self._tried = -1
        self._has_top_misfit = self._is_over = False
        self._num_alone = 0
        """Tokens for one that goes by itself, and is tried last."""
        self._lengths: dict[int, int] = {}

    @property
    def lengths(self) -> dict[int, int]:
        """Tokens to compute now, by index of those that entered, in the order of the items."""
        return {index: self._lengths[index] for index in sorted(self._lengths)}

    def next(self) -> int | None:
        """Index of whom to find a slot and pages for; None at the end of the round."""
        while not self._is_over:
            index = next(self._left, None)
            if index is None or self._ends_before(self._items[index]):
                break
            if self._headroom.fits(self._items[index].cost):
                self._tried = index
                return index
            self._has_top_misfit |= self._items[index].level == self._items[0].level
            self._is_over = self._stops
        self._is_over = True
        if not self._has_top_misfit or self._lengths or self.is_preempting or self._num_alone:
            return None
        self._num_alone = self._headroom.take_alone(self._items[0].cost)
        self._tried = 0
        return 0 if self._num_alone else None

    def report(self, outcome: Outcome) -> None:
        """What came of trying the one that `next` named."""
        cost, level, _ = self._items[self._tried]
        if self._num_alone:
            if outcome is Outcome.ENTERED:
                self._lengths[self._tried] = self._num_alone
        elif outcome is Outcome.ENTERED:
            self._lengths[self._tried] = self._headroom.take(cost)
            if self._max_drop:
                self._floor = max(self._floor, level - self._max_drop + 1)
        elif outcome is Outcome.PREEMPTING:
            self._headroom.take(cost)
            self.is_preempting, self._floor = True, level
        elif outcome is Outcome.NO_CAPACITY:
            self._is_over = self._stops
            self._floor = max(self._floor, level)

    def _ends_before(self, item: Item) -> bool:
        if item.level < self._floor or not self._headroom.is_open:
            return True
        waits_for_top = self._has_top_misfit and not self._lengths and not self.is_preempting
        return waits_for_top and item.level < self._items[0].level
