"""How one step's tokens are shared between decodes, prompts under way, and new requests."""

from __future__ import annotations

from collections.abc import Sequence

from worker.scheduler.policy import TokenRoom


class StepBudget:
    """The token budget of one step. Decodes come first, so that no prompt stalls them.

        max_tokens   │ decodes │ prompts: at most max_prefill_tokens                    │
                               │ under way: together their share │ new │ under way again │

    Prompts under way leave to those that wait all but `share` of the prompt tokens, and take what
    these leave. So a long prompt delays short ones behind it by a step or two, not by all of its
    steps; and no token goes unused while somebody wants it.

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

    def room(self, needs: Sequence[int], max_requests: int) -> TokenRoom:
        """What new requests may take beside running ones that need so many tokens each."""
        if not self._chunked:
            tokens = self._prompts - sum(needs)
            alone = 0 if needs else self._rest
            return TokenRoom(
                tokens=max(tokens, 0),
                most=self._prompts,
                alone=alone,
                requests=max_requests,
                chunked=False,
            )
        most = self._most(self._prompts)
        return TokenRoom(
            tokens=self._prompts - min(sum(needs), most),
            most=most,
            alone=0,
            requests=max_requests,
            chunked=True,
        )

    def allot(self, needs: Sequence[int], new: Sequence[int], costs: Sequence[int]) -> list[int]:
        """Tokens of each prompt under way, then of each new one.

        Args:
            needs: tokens that prompts under way could use.
            new: tokens that `room` handed out to new ones, one per request.
            costs: tokens that these could use.
        """
        left = max(self._prompts - sum(new), 0)
        if not self._chunked and needs:
            left = max(self._rest - sum(new), 0)  # begun in a step of its own, it goes on in one
        most = self._most(left) if len(needs) > 1 else left
        lengths = [0] * len(needs) + list(new)
        wants = [*needs, *costs]
        for limit in (most, left):
            for place in range(len(needs)):
                extra = min(wants[place], limit) - lengths[place]
                extra = max(min(extra, left), 0)
                lengths[place] += extra
                left -= extra
        for place in range(len(needs), len(wants)):
            extra = max(min(wants[place] - lengths[place], left), 0)
            lengths[place] += extra
            left -= extra
        self._unused = self._rest - sum(lengths)
        return lengths

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
