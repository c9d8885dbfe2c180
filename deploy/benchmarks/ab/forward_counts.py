"""Counts the forward passes of a schedule from the rounds of its blocks, without an engine.

All requests are queued at the start. Free slots are filled in order of arrival before every forward
pass, or before every batch if synchronous.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class CountedRequest:
    """Forward passes that a request needs."""

    prompt_blocks: int
    """Number of full blocks in the prompt."""
    passes: tuple[int, ...]
    """Forward passes per generated block, including the pass that commits it, if any."""


@dataclass(slots=True)
class _State:
    """A running request."""

    has_prompt: bool
    """Whether the request's prompt has yet to be computed."""
    left: list[int]
    """Remaining passes per block."""


def count_joined(requests: Sequence[CountedRequest], running: int) -> int:
    """Number of forward passes of FDFO if prompts and commits share the passes of running
    blocks."""
    ends = [0] * running
    for request in requests:
        first = min(range(running), key=ends.__getitem__)
        ends[first] += sum(request.passes)
    return max(ends)


def count_separate(requests: Sequence[CountedRequest], running: int, *, synchronous: bool) -> int:
    """Number of forward passes if prompts and commits have separate passes.

    A whole prompt is computed in one pass, together with the running blocks of other requests. A
    request whose prompt fills no block starts with its first block.

    Args:
        requests: requests in order of arrival.
        running: maximum number of running requests.
        synchronous: whether all blocks of a batch wait until the last one is done.
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
