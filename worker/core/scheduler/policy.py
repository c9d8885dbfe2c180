"""Admission policies.

`--schedule-policy` is the queue order of equally urgent requests; `--prefill-admission-policy` is
the order in which a round tries them, and when the round ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from types import MappingProxyType
from typing import Final, NamedTuple

from worker.protocol.admission import AdmissionPolicyName, SchedulePolicy


class Item(NamedTuple):
    """A waiting request, as seen by a policy."""

    cost: int
    """Number of uncached tokens, which have to be computed."""
    level: int
    """Urgency; a round tries requests in descending order of level."""
    num_tokens: int
    """Number of known tokens, cached or not: the prompt, and generated tokens of a preempted
    request."""


class QueueOrder(NamedTuple):
    """An order of equally urgent requests other than first come, first served.

    To add one, add an entry to `ORDERS` and its name to `worker.protocol.admission`.
    """

    key: Callable[[Item], float]
    """Sort key, lowest first; ties are broken by order of arrival."""
    max_queue: int
    """Maximum length of a queue that is sorted; sorting longer queues costs more than it saves."""

    def order(self, items: Sequence[Item]) -> list[int]:
        """Indices of the items in queue order, with levels in descending order."""
        return _ordered(items, self.key)


ORDERS: Final[Mapping[SchedulePolicy, QueueOrder | None]] = MappingProxyType(
    {
        "fcfs": None,
        "lpm": QueueOrder(key=lambda item: item.cost - item.num_tokens, max_queue=128),
    }
)
"""Queue orders by their names in `--schedule-policy`; None is the order of arrival. lpm (longest
prefix match) puts the request with the most cached tokens first, up to the same queue length as
in SGLang."""


class AdmissionPolicy(NamedTuple):
    """Order in which a round tries equally urgent requests, and when it stops.

    To add one, add an entry to `POLICIES` and its name to `worker.protocol.admission`.
    """

    stops: bool
    """Whether the round ends at the first request that does not fit. If so, the round only
    considers as many requests as could be admitted; otherwise, it considers
    `prefill_admission_lookahead` requests."""
    key: Callable[[Item], float] | None = None
    """Sort key, lowest first; ties keep the order of the queue. None keeps that order for all
    requests."""

    def order(self, items: Sequence[Item]) -> list[int]:
        """Indices of the items in the order in which they are tried, with levels in descending
        order."""
        return list(range(len(items))) if self.key is None else _ordered(items, self.key)

    def in_turn(self, items: Sequence[Item], tenants: Sequence[str]) -> list[int]:
        """Indices of the items in the order in which they are tried. Each tenant keeps its turns in
        the queue; only the order of its own requests changes.

        Args:
            items: requests in queue order, which determines the tenants' turns.
            tenants: the tenant of each request.
        """
        turns: dict[tuple[int, str], list[int]] = defaultdict(list)
        for index, (item, tenant) in enumerate(zip(items, tenants, strict=True)):
            turns[item.level, tenant].append(index)
        ordered = list(range(len(items)))
        for members in turns.values():
            for turn, index in zip(members, self.order([items[i] for i in members]), strict=True):
                ordered[turn] = members[index]
        return ordered


POLICIES: Final[Mapping[AdmissionPolicyName, AdmissionPolicy]] = MappingProxyType(
    {
        "fifo": AdmissionPolicy(stops=True),
        "pack": AdmissionPolicy(stops=False, key=lambda item: item.cost),
    }
)
"""Policies by their names in `--prefill-admission-policy`. pack tries requests by ascending cost,
which admits as many requests as fit, at minimum cost."""


def _ordered(items: Sequence[Item], key: Callable[[Item], float]) -> list[int]:
    return sorted(range(len(items)), key=lambda i: (-items[i].level, key(items[i]), i))


class Outcome(Enum):
    """Outcome of trying to admit one request for which there are enough tokens."""

    ENTERED = auto()
    NO_CAPACITY = auto()
    """There are too few free slots or pages."""
    WAITS = auto()
    """The request waits for a prefix that another request is computing; other requests may be
    tried."""
    PREEMPTING = auto()
    """A slot and pages will be free in the next step, since running requests are about to be
    preempted."""


class StepHeadroom:
    """Headroom of a round: prompt tokens to grant, and number of requests to admit.

    Args:
        tokens: prompt tokens left for new requests.
        max_each: maximum number of tokens that one new request may take initially; the rest is
            distributed afterwards.
        alone: maximum number of tokens of a request that does not fit into any round and gets a
            separate step; 0 while other prefills are running.
        requests: maximum number of requests to admit.
        chunked: whether a prompt may be computed in chunks; otherwise, it is computed as a whole.
    """

    def __init__(
        self, *, tokens: int, max_each: int, alone: int, requests: int, chunked: bool
    ) -> None:
        self.tokens = tokens
        self.requests = requests
        self.max_each = max_each
        self._alone = alone
        self._chunked = chunked

    @property
    def is_open(self) -> bool:
        """Whether any more requests could be admitted."""
        return self.tokens > 0 and self.requests > 0

    def fits(self, cost: int) -> bool:
        """Whether there is room for a request whose cost is `cost`."""
        return self.is_open and (self._chunked or cost <= self.tokens)

    def take(self, cost: int) -> int:
        """Grants tokens to a request that fits; returns their number."""
        length = min(cost, self.max_each, self.tokens)
        self.tokens -= length
        self.requests -= 1
        return length

    def take_alone(self, cost: int) -> int:
        """Grants a request a separate step; returns the number of tokens granted, or 0 if it does
        not fit."""
        length = min(cost, self._alone) if self.requests else 0
        if length:
            self.tokens = 0
            self.requests = 0
        return length


class AdmissionRound:
    """One admission round: selects the request to try next, and grants tokens to admitted requests.

    The caller alternates between `next` and `report`. If no request of the highest level fits into
    the headroom, the first of them gets a separate step, so that it is neither starved nor delayed
    by less urgent ones.

    Args:
        policy: order in which requests are tried.
        items: requests in queue order.
        headroom: numbers of tokens and requests for which the step has room.
        max_drop: requests this many levels or more below an admitted one are not admitted, since
            they would make the step longer for the urgent one; 0 for no limit.
        floor: minimum level that is admitted.
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
        """Whether running requests are about to be preempted for a request that was tried. From
        then on, a request is only admitted if it preempts running ones itself, and less urgent ones
        are not admitted."""
        self._stops = policy.stops
        self._items = items
        self._headroom = headroom
        self._max_drop = max_drop
        self._floor = floor
        """Minimum level that is admitted. It rises with the level of admitted requests
        (`max_drop`), and when there are too few pages for a request, since less urgent requests
        must not take the remaining ones."""
        self._left = iter(policy.order(items))
        self._tried = -1
        self._has_top_misfit = self._is_over = False
        self._num_alone = 0
        """Number of tokens of the request that gets a separate step, which is tried last; 0 if
        there is none."""
        self._lengths: dict[int, int] = {}

    @property
    def lengths(self) -> dict[int, int]:
        """Tokens granted to admitted requests, by index, in the order of the items."""
        return {index: self._lengths[index] for index in sorted(self._lengths)}

    def next(self) -> int | None:
        """Index of the next request to try; None at the end of the round."""
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
        """Reports the outcome for the request returned by `next`."""
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
