"""Number of forward passes of a schedule, counted from rounds alone, without an engine.

All requests are queued at the start; the running set is refilled, first come first served, before
every forward pass, or, if synchronous, before every batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class CountedRequest:
    """Forward passes that a request needs."""

    prompt_blocks: int
    """Whole blocks of the prompt."""
    passes: tuple[int, ...]
    """Forward passes of each generated block, including one that commits it, if there is one."""


@dataclass(slots=True)
class _State:
    """A running request."""

    has_prompt: bool
    """Whether its prompt has not been computed yet."""
    left: list[int]
    """Remaining passes of each block."""


def count_joined(requests: Sequence[CountedRequest], running: int) -> int:
    """Passes of first done, first out with prompts and commits in passes of running blocks."""
    ends = [0] * running
    for request in requests:
        first = min(range(running), key=ends.__getitem__)
        ends[first] += sum(request.passes)
    return max(ends)


def count_separate(requests: Sequence[CountedRequest], running: int, *, synchronous: bool) -> int:
    """Number of forward passes if a request's prompt and the commit of each block take separate
    passes.

    A prompt is computed whole, in the same pass as running blocks of others. A request whose prompt
    fills no block begins with its first block.

    Args:
        requests: requests in the order of their arrivals.
        running: maximum number of running requests.
        synchronous: whether all blocks of a batch wait for the last one to be done.
    """
    waiting = [_State(request.prompt_blocks > 0, list(request.passes)) for request in requests]
    waiting.reverse()
    members: list[_State] = []
    num_forwards = 0
    while waiting or members:
        while waiting and len(members) < running:
            members.append(waiting.pop())
        decided = [member for member in members if not member.has_prompt]
        for member in members:
            member.has_prompt = False
        num_rounds = max((member.left[0] for member in decided), default=1) if synchronous else 1
        num_forwards += num_rounds
        for member in decided:
            member.left[0] -= num_rounds
            if member.left[0] <= 0:
                del member.left[0]
        members = [member for member in members if member.left]
    return num_forwards
