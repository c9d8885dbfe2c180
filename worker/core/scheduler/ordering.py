"""Orders of the queue among equally urgent requests, other than first come first served."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from worker.core.request import Request, RequestState

COUNTED_ROUNDS = 16
"""Rounds for which a look-up in the prefix cache is taken to hold: the cache changes slowly."""
LEVEL = 2
"""Ranks of a level."""


def rank(request: Request) -> int:
    """Its level, and within it before the others where it has run already."""
    return LEVEL * request.level + (request.state is RequestState.PREEMPTED)


def lpm_order(requests: Sequence[Request], costs: Sequence[int]) -> list[Request]:
    """Longest prefix match: the more of its tokens are cached, the earlier; ties as they come.

    Args:
        requests: in the order of the queue.
        costs: tokens of each that are not cached.
    """
    places = sorted(
        range(len(requests)),
        key=lambda i: (-rank(requests[i]), costs[i] - len(requests[i].token_ids), i),
    )
    return [requests[place] for place in places]


def cheapest_in_turn(requests: Sequence[Request], costs: Sequence[int]) -> list[Request]:
    """Every tenant keeps its turns, and takes its cheapest request first.

    Args:
        requests: in the order of the queue, which gives tenants their turns.
        costs: tokens of each that are not cached.
    """
    places: dict[tuple[int, str], list[int]] = defaultdict(list)
    for place, request in enumerate(requests):
        places[rank(request), request.tenant].append(place)
    ordered = list(requests)
    for turns in places.values():
        cheapest = sorted(turns, key=lambda place: (costs[place], place))
        for turn, place in zip(turns, cheapest, strict=True):
            ordered[turn] = requests[place]
    return ordered
