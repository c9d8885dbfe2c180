"""Policy and token budget of block-diffusion steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from worker.config import DllmConfig
from worker.core.scheduler.policy import StepHeadroom

MAX_ROUNDS = 8
"""Maximum number of rounds in a step in which no block finishes. After that, the step ends so that
new requests can be admitted."""
MAX_ROUNDS_AHEAD = MAX_ROUNDS // 2
"""Maximum number of rounds of a step that is launched ahead. Two such steps take no longer than one
step of MAX_ROUNDS rounds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockPolicy:
    """Optimizations of block-diffusion steps, none of which change the generated tokens."""

    size: int
    """Positions per block."""
    inplace: bool = True
    """Whether running blocks keep their slots and pages between rounds, and continue without the
    scheduler until a block of the batch is finished."""
    mixed_rounds: bool = True
    """Whether prompts (many blocks at once) are computed together with running blocks. Otherwise,
    they are computed one block at a time in separate rounds before all running blocks."""
    fused_commit: bool = True
    """Whether a row can have a running block preceded by earlier positions, so that the last pass
    over a finished block is combined with the first pass over the next block."""
    has_canvases: bool = False
    """Whether blocks are canvases, which follow the known tokens at any position."""

    @classmethod
    def of(cls, config: DllmConfig, size: int, *, has_canvases: bool = False) -> Self:
        """Policy for an engine whose model has blocks, or canvases, of `size` positions."""
        if has_canvases:
            mixed = config.fdfo
            return cls(size=size, mixed_rounds=mixed, fused_commit=False, has_canvases=True)
        features = config.features
        return cls(
            size=size,
            inplace="inplace" in features,
            mixed_rounds="mixed_rounds" in features,
            fused_commit="fused_commit" in features,
        )

    def width(self, num_pending: int) -> int:
        """Number of positions of a request to compute in one row, if the token budget allows.

        Args:
            num_pending: number of positions not computed yet, including those of the running block.
        """
        if self.fused_commit or num_pending == self.size:
            return num_pending
        return num_pending - self.size


class BlockBudget:
    """Token budget of a step in whole blocks. Running blocks come first, so that prompts never
    stall them.

    Args:
        max_tokens: token budget of the step.
        policy: decides which positions a row may have.
        pending: pending positions of each running request.
    """

    def __init__(self, max_tokens: int, policy: BlockPolicy, pending: Iterable[int]) -> None:
        self._policy = policy
        size = policy.size
        reserved = sum(policy.width(number) for number in pending if self._is_running(number))
        whole_blocks = max_tokens // size * size
        self._reserved = min(whole_blocks, reserved)
        self._left = whole_blocks - self._reserved

    def grant(self, num_pending: int) -> int:
        """Takes the tokens for the positions (whole blocks) that a running request may compute in
        this step; returns their number."""
        if not self._is_running(num_pending):
            return self._grant_prompt(num_pending)
        length = min(self._policy.width(num_pending), self._reserved)
        self._reserved -= length
        return length

    def headroom(self, max_requests: int) -> StepHeadroom:
        """Headroom for new requests, at least a block each, in the tokens left by `grant`."""
        return StepHeadroom(
            tokens=self._left,
            max_each=self._left,
            alone=0,
            requests=min(max_requests, self._left // self._policy.size),
            chunked=True,
        )

    def grant_new(self, pending: Sequence[int]) -> list[int]:
        """Takes the tokens for positions of admitted requests; returns the number of positions for
        each: one block and, while tokens are left, more for the first requests."""
        size = self._policy.size
        self._left -= size * len(pending)
        lengths = []
        for number in pending:
            self._left += size
            lengths.append(self._grant_prompt(number))
        return lengths

    def _grant_prompt(self, num_pending: int) -> int:
        width = self._policy.width(num_pending)
        if not self._policy.mixed_rounds:
            width = min(width, self._policy.size)
        length = min(width, self._left)
        self._left -= length
        return length

    def _is_running(self, num_pending: int) -> bool:
        """Whether only a running block is left, or a running block and one block to commit."""
        return num_pending <= 2 * self._policy.size
