"""How one step's tokens are shared between decodes and prefill chunks."""

from __future__ import annotations


class StepBudget:
    """The token budget of one step. Decodes come first, so that no prompt stalls them.

    Args:
        max_tokens: most tokens of the step.
        num_decodes: running requests that have exactly one token to compute.
    """

    def __init__(self, max_tokens: int, num_decodes: int) -> None:
        self._decodes = min(max_tokens, num_decodes)
        self._chunks = max_tokens - self._decodes

    def grant(self, num_pending: int) -> int:
        """How many of a running request's pending tokens this step may compute."""
        return min(1, self._decodes) if num_pending == 1 else min(num_pending, self._chunks)

    @property
    def has_room_for_new(self) -> bool:
        """Whether a new request could compute anything."""
        return self._chunks > 0

    def grant_new(self, num_pending: int) -> int:
        """The same for a request on its way into the running set, for which nothing is kept."""
        return min(num_pending, self._chunks)

    def spend(self, num_pending: int, length: int) -> None:
        """Takes a running request's row out of the budget."""
        if num_pending == 1:
            self._decodes -= 1
        else:
            self._chunks -= length

    def spend_new(self, length: int) -> None:
        """Takes a new request's row out of the budget."""
        self._chunks -= length
