"""How many forward passes a schedule takes, counted from rounds alone, without an engine.

All requests are there from the start; the running set is refilled, first come first served, before
every forward pass (or, synchronously, before every batch).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class CountedRequest:
    """The forward passes that a request needs."""

    prompt_blocks: int
    """Whole blocks of its prompt."""
    passes: tuple[int, ...]
    """Forward passes of each running block, that which commits it included where there is one."""


@dataclass(slots=True)
class _State:
    has_prompt: bool
    left: list[int]


def count_joined(requests: Sequence[CountedRequest], running: int) -> int:
    """First done, first out, where prompts and commits ride on rounds of running blocks."""
    ends = [0] * running
    for request in requests:
        first = min(range(running), key=ends.__getitem__)
        ends[first] += sum(request.passes)
    return max(ends)


def count_separate(requests: Sequence[CountedRequest], running: int, *, synchronous: bool) -> int:
    """A prompt, and each block's commit, in a pass before what follows of the same request.

    Prompts are computed beside running blocks, each at once. A request whose prompt fills no block
    begins at once.
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
