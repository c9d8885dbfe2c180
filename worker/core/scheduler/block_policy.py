"""Policy and token budget of block-diffusion steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from worker.config import EngineConfig
from worker.core.scheduler.policy import StepHeadroom

MAX_ROUNDS = 8
"""Most rounds of a step in which no block gets done: the scheduler then takes in new arrivals."""
MAX_ROUNDS_AHEAD = MAX_ROUNDS // 2
"""Most rounds of a step launched behind another: two of them take no longer than one alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockPolicy:
    """Optimizations of a block-diffusion model's steps. None of them changes any token."""

    size: int
    """Positions per block."""
    inplace: bool = True
    """Whether a running block keeps its slot and pages between rounds, and continues by itself
    while none of its batch is done."""
    mixed_rounds: bool = True
    """Whether prompts, many blocks at once, are computed beside running blocks; otherwise in
    rounds of their own, before all running blocks, one block each."""
    fused_commit: bool = True
    """Whether a row may end with a running block and begin with what is before it: the last pass
    of a finished block then rides on the first of the next one."""

    @classmethod
    def of(cls, config: EngineConfig, size: int) -> Self:
        """The policy of an engine whose model has blocks of `size` positions."""
        features = config.dllm_features
        return cls(
            size=size,
            inplace="inplace" in features,
            mixed_rounds="mixed_rounds" in features,
            fused_commit="fused_commit" in features,
        )

    def width(self, num_pending: int) -> int:
        """Positions that one row computes of a request, if there are tokens for them.

        Args:
            num_pending: positions not computed, those of the running block included.
        """
        if self.fused_commit or num_pending == self.size:
            return num_pending
        return num_pending - self.size


class BlockBudget:
    """Token budget of a step in whole blocks. Running blocks come first: no prompt stalls them.

    Args:
        max_tokens: token budget of the step.
        policy: what rows may consist of.
        pending: pending positions of each running request.
    """

    def __init__(self, max_tokens: int, policy: BlockPolicy, pending: Iterable[int]) -> None:
        self._policy = policy
        size = policy.size
        kept = sum(policy.width(number) for number in pending if self._is_running(number))
        most = max_tokens // size * size
        self._kept = min(most, kept)
        self._left = most - self._kept

    def grant(self, num_pending: int) -> int:
        """Takes the positions, whole blocks, that a running request may compute in this step."""
        if not self._is_running(num_pending):
            return self._grant_prompt(num_pending)
        length = min(self._policy.width(num_pending), self._kept)
        self._kept -= length
        return length

    def headroom(self, max_requests: int) -> StepHeadroom:
        """Headroom for new requests, at least a block each, of what `grant` has left."""
        return StepHeadroom(
            tokens=self._left,
            most=self._left,
            alone=0,
            requests=min(max_requests, self._left // self._policy.size),
            chunked=True,
        )

    def grant_new(self, pending: Sequence[int]) -> list[int]:
        """Takes the positions of admitted requests: a block each, and more for the first ones."""
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
        """Whether all that is left is a running block, or that and one to commit."""
        return num_pending <= 2 * self._policy.size
