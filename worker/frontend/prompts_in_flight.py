"""PromptsInFlight: prompts of all gateways that the engine has not computed yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from worker.protocol.messages import PromptInFlight, Submit, TokenDelta


class PromptsInFlight:
    """Prompts with sampled block hashes in one epoch, from their submission to their first token.

    Each gateway receives the prompts of the others, so that requests with a common prefix that
    arrive at several gateways are routed to one worker while it computes the prefix.
    """

    def __init__(self) -> None:
        self.open: dict[str, PromptInFlight] = {}
        """Prompts in flight by request id."""
        self.computed: list[int] = []
        """Ordinals of prompts that have ended since `take_computed` was last called."""

    @property
    def all(self) -> list[PromptInFlight]:
        """The prompts, oldest first."""
        return list(self.open.values())

    def add(self, submits: Sequence[Submit], last_ordinal: int) -> list[PromptInFlight]:
        """Adds a batch whose last submit has ordinal `last_ordinal`; the others have the ordinals
        before it.

        Returns:
            The prompts for other gateways. Their hashes are removed from the submits, since the
            engine does not need them.
        """
        added = []
        for ordinal, submit in enumerate(submits, last_ordinal - len(submits) + 1):
            self.end(submit.request_id)  # an earlier attempt
            if submit.sampled_blocks or submit.shared_block:
                prompt = PromptInFlight(ordinal, submit.sampled_blocks, submit.shared_block)
                added.append(prompt)
            if submit.sampled_blocks:
                self.open[submit.request_id] = added[-1]
        return added

    def apply(self, deltas: Mapping[str, Sequence[TokenDelta]]) -> None:
        """Ends prompts whose first token a step has generated, given the step's deltas."""
        for changes in deltas.values():
            for delta in changes:
                if delta.num_cached_tokens >= 0 or delta.finish_reason is not None:
                    self.end(delta.request_id)

    def end(self, request_id: str) -> None:
        """Ends a prompt that has been computed or never will be. Idempotent."""
        prompt = self.open.pop(request_id, None)
        if prompt is not None:
            self.computed.append(prompt.ordinal)

    def take_computed(self) -> list[int]:
        """Ordinals of prompts that have ended since the last call."""
        computed, self.computed = self.computed, []
        return computed
