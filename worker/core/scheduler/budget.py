"""Token budget of one step, shared by decodes, running prefills and new requests."""

from __future__ import annotations

from collections.abc import Sequence

from worker.core.scheduler.policy import StepHeadroom


class StepBudget:
    """The token budget of one step. Decodes come first, so that prefills never stall them.

        max_tokens   │ decodes │ prefill: at most max_prefill_tokens                │
                               │ running: together their share │ new │ running again  │

    Running prefills leave a fraction of 1 - `share` of the prompt tokens to new requests, and also
    take any of these that new requests do not use. A long prompt thus delays short ones behind it
    by a step or two, not by all of its steps, and no token is unused while a request could use it.
    Shares apply between equally urgent requests.

    Args:
        max_tokens: token budget of the step.
        num_decodes: number of running requests with exactly one token to compute.
        max_prefill_tokens: maximum number of tokens for prefill; 0 for all tokens left by decodes.
        share: maximum fraction of the prompt tokens that one prompt, or all running prefills
            together, may take while other prompts need some.
        chunked: whether chunked prefill is enabled.
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
        """Number of tokens left over by `allot`."""
        self._share = share if chunked else 1.0
        self._chunked = chunked

    @property
    def max_prompts(self) -> int:
        """Number of prompt tokens for which the step has room."""
        return self._prompts

    def headroom(self, needs: Sequence[int], max_requests: int, above: int = 0) -> StepHeadroom:
        """Headroom for new requests alongside the running prefills.

        Args:
            needs: pending tokens of each running prefill that is as urgent as the most urgent new
                request.
            max_requests: maximum number of requests to admit.
            above: pending tokens of more urgent running prefills.
        """
        if self._chunked:
            room, alone = max(self._prompts - above, 0), 0
            max_each = self._shared_limit(room)
            tokens = room - min(sum(needs), max_each)
        else:
            max_each, alone = self._prompts, 0 if needs else self._rest
            tokens = max(max_each - sum(needs), 0)
        return StepHeadroom(
            tokens=tokens,
            max_each=max_each,
            alone=alone,
            requests=max_requests,
            chunked=self._chunked,
        )

    def allot(
        self,
        needs: Sequence[int],
        new: Sequence[int],
        costs: Sequence[int],
        priorities: Sequence[int] = (),
    ) -> list[int]:
        """Allots tokens to each running prefill, then to each new request.

        Prompts of the highest priority get all tokens that they can use, then those of the next
        priority; shares apply among prompts of equal priority. Each new request gets at least one
        token.

        Args:
            needs: pending tokens of each running prefill.
            new: tokens granted to each new request by the headroom.
            costs: pending tokens of each new request.
            priorities: priorities of the running prefills, then of new requests; empty if all are
                equal.
        """
        granted = [*[0] * len(needs), *new]
        lengths = [min(length, 1) for length in granted] if self._chunked else list(granted)
        # Without chunking, a prompt that was begun in a separate step continues in one.
        max_prompts = self._prompts if self._chunked or not needs else self._rest
        left = max(max_prompts - sum(lengths), 0)
        pending = [*needs, *costs]
        indices = range(len(pending))
        for priority in sorted(set(priorities), reverse=True) if priorities else (0,):
            equals = [p for p in indices if not priorities or priorities[p] == priority]
            left = self._allot_equals(
                [index for index in equals if index < len(needs)],
                [index for index in equals if index >= len(needs)],
                pending,
                granted,
                lengths,
                left,
            )
        self._unused = self._rest - sum(lengths)
        return lengths

    def _allot_equals(
        self,
        running: Sequence[int],
        new: Sequence[int],
        pending: Sequence[int],
        granted: Sequence[int],
        lengths: list[int],
        left: int,
    ) -> int:
        """Distributes up to `left` tokens to prompts of one priority, in place; returns the number
        of tokens that remain.

        Args:
            running: indices of running prefills.
            new: indices of new requests.
            pending: pending tokens by index.
            granted: tokens granted by the headroom, by index.
            lengths: tokens allotted so far, by index; increased in place.
            left: number of tokens to distribute.
        """
        reserved = min(sum(pending[index] for index in running), self._shared_limit(left))
        for index in new:
            extra = max(min(granted[index] - lengths[index], left - reserved), 0)
            lengths[index] += extra
            left -= extra
        first_limit = self._shared_limit(left) if len(running) > 1 else left
        for limit in (first_limit, left):
            for index in running:
                extra = min(pending[index], limit) - lengths[index]
                extra = max(min(extra, left), 0)
                lengths[index] += extra
                left -= extra
        for index in new:
            extra = max(min(pending[index] - lengths[index], left), 0)
            lengths[index] += extra
            left -= extra
        return left

    def take_decode(self) -> bool:
        """Takes a token for a decode; returns whether one was available."""
        self._decodes -= 1
        return self._decodes >= 0

    def add_decodes(self, count: int) -> None:
        """Adds tokens for up to `count` more decodes if prefills have left any."""
        granted = min(count, self._unused)
        self._decodes += granted
        self._unused -= granted

    def give_back(self, count: int) -> None:
        """Makes `count` tokens available again that were granted to prompts but are not computed in
        this step."""
        self._unused += count

    def take_drafts(self, count: int) -> int:
        """Takes tokens for up to `count` drafts of a decode if prefills have left any."""
        granted = max(0, min(count, self._unused))
        self._unused -= granted
        return granted

    def _shared_limit(self, tokens: int) -> int:
        return max(1, int(self._share * tokens)) if tokens > 0 else 0
