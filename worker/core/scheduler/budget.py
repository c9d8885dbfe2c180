"""How one step's tokens are shared between decodes, prompts under way, and new requests."""

from __future__ import annotations

from collections.abc import Sequence

from worker.core.scheduler.policy import StepHeadroom


class StepBudget:
    """The token budget of one step. Decodes come first, so that no prompt stalls them.

        max_tokens   │ decodes │ prompts: at most max_prefill_tokens                    │
                               │ under way: together their share │ new │ under way again │

    Prompts under way leave to those that wait all but `share` of the prompt tokens, and take what
    these leave. So a long prompt delays short ones behind it by a step or two, not by all of its
    steps; and no token goes unused while somebody wants it. Shares are for equally urgent ones.

    Args:
        max_tokens: most tokens of the step.
        num_decodes: running requests that have exactly one token to compute.
        max_prefill_tokens: most of them for prompts; 0 for as many as there are.
        share: of the prompt tokens, that one request may take while others want some.
        chunked: whether prompts may be computed in parts at will.
    """

    def __init__(
        self,
        max_tokens: int,
        num_decodes: int,
        *,
        max_prefill_tokens: int = 0,
        share: float = 1.0,
        chunked: bool = True,
    ) -> None:
        self._decodes = min(max_tokens, num_decodes)
        self._rest = max_tokens - self._decodes
        self._prompts = min(self._rest, max_prefill_tokens) if max_prefill_tokens else self._rest
        self._unused = self._rest
        """What `allot` left."""
        self._share = share if chunked else 1.0
        self._chunked = chunked

    @property
    def max_prompts(self) -> int:
        """Prompt tokens that the step has room for."""
        return self._prompts

    def headroom(self, needs: Sequence[int], max_requests: int, above: int = 0) -> StepHeadroom:
        """What new requests may take beside running ones that need so many tokens each.

        Args:
            needs: of prompts under way that are as urgent as the most urgent new one.
            max_requests: most that may be admitted.
            above: tokens that more urgent prompts under way could use.
        """
        if self._chunked:
            room, alone = max(self._prompts - above, 0), 0
            most = self._most(room)
            tokens = room - min(sum(needs), most)
        else:
            most, alone = self._prompts, 0 if needs else self._rest
            tokens = max(most - sum(needs), 0)
        return StepHeadroom(
            tokens=tokens, most=most, alone=alone, requests=max_requests, chunked=self._chunked
        )

    def allot(
        self,
        needs: Sequence[int],
        new: Sequence[int],
        costs: Sequence[int],
        priorities: Sequence[int] = (),
    ) -> list[int]:
        """Tokens of each prompt under way, then of each new one.

        The most urgent get all that they can use, then the next: shares are for equals. Each new
        one gets a token at least.

        Args:
            needs: tokens that prompts under way could use.
            new: tokens that `headroom` handed out to new ones, one per request.
            costs: tokens that these could use.
            priorities: of those under way, then of the new ones; empty where all are equals.
        """
        granted = [*[0] * len(needs), *new]
        lengths = [min(one, 1) for one in granted] if self._chunked else list(granted)
        # Not chunked, a prompt that was begun in a step of its own continues in one.
        most = self._prompts if self._chunked or not needs else self._rest
        left = max(most - sum(lengths), 0)
        wants = [*needs, *costs]
        indices = range(len(wants))
        for priority in sorted(set(priorities), reverse=True) if priorities else (0,):
            equals = [p for p in indices if not priorities or priorities[p] == priority]
            left = self._allot_equals(
                [index for index in equals if index < len(needs)],
                [index for index in equals if index >= len(needs)],
                wants,
                granted,
                lengths,
                left,
            )
        self._unused = self._rest - sum(lengths)
        return lengths

    def _allot_equals(
        self,
        under_way: Sequence[int],
        new: Sequence[int],
        wants: Sequence[int],
        granted: Sequence[int],
        lengths: list[int],
        left: int,
    ) -> int:
        """Raises `lengths` at these places by at most `left` in all; returns what is left then."""
        kept = min(sum(wants[index] for index in under_way), self._most(left))
        for index in new:
            extra = max(min(granted[index] - lengths[index], left - kept), 0)
            lengths[index] += extra
            left -= extra
        most = self._most(left) if len(under_way) > 1 else left
        for limit in (most, left):
            for index in under_way:
                extra = min(wants[index], limit) - lengths[index]
                extra = max(min(extra, left), 0)
                lengths[index] += extra
                left -= extra
        for index in new:
            extra = max(min(wants[index] - lengths[index], left), 0)
            lengths[index] += extra
            left -= extra
        return left

    def take_decode(self) -> bool:
        """Whether a decode may go; takes its token."""
        self._decodes -= 1
        return self._decodes >= 0

    def add_decodes(self, count: int) -> None:
        """Lets so many more decodes go, as far as prompts left tokens for them."""
        granted = min(count, self._unused)
        self._decodes += granted
        self._unused -= granted

    def take_drafts(self, most: int) -> int:
        """How many of so many drafts may follow a decode; takes them from what prompts left."""
        granted = max(0, min(most, self._unused))
        self._unused -= granted
        return granted

    def _most(self, tokens: int) -> int:
        return max(1, int(self._share * tokens)) if tokens > 0 else 0
