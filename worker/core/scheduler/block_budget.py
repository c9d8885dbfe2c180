"""The token budget of a step of blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from worker.core.scheduler.block_policy import BlockPolicy
from worker.core.scheduler.budget import StepBudget
from worker.core.scheduler.policy import TokenRoom


class BlockBudget(StepBudget):
    """Hands out whole blocks. Running blocks come first, so that no prompt stalls them.

    Args:
        max_tokens: most tokens of the step.
        policy: what rows may consist of.
        pending: positions that each running request has not computed.
    """

    def __init__(self, max_tokens: int, policy: BlockPolicy, pending: Iterable[int]) -> None:
        super().__init__(0, 0)
        self._policy = policy
        size = policy.size
        kept = sum(policy.width(number) for number in pending if self._is_running(number))
        most = max_tokens // size * size
        self._kept = min(most, kept)
        self._left = most - self._kept

    def grant(self, num_pending: int) -> int:
        """Takes out what a running request may compute in this step: whole blocks."""
        if not self._is_running(num_pending):
            return self._grant_prompt(num_pending)
        length = min(self._policy.width(num_pending), self._kept)
        self._kept -= length
        return length

    def room(self, needs: Sequence[int], max_requests: int, above: int = 0) -> TokenRoom:
        """What new requests may take: at least a block each, of what `grant` has left."""
        return TokenRoom(
            tokens=self._left,
            most=self._left,
            alone=0,
            requests=min(max_requests, self._left // self._policy.size),
            chunked=True,
        )

    def grant_new(self, pending: Sequence[int]) -> list[int]:
        """Takes out what admitted requests may compute: a block each, the first ones more."""
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
