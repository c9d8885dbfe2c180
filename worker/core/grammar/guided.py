"""Requests with grammars: their grammar states, and the masks of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from worker.core.grammar.state import GrammarAdvance, GrammarState, GrammarStatus, SampledTokens

RequestKey = tuple[str, int]
"""Request id and attempt."""


class GuidedRequests:
    """Grammar states of requests, which accept the sampled tokens of each step and provide the next
    masks.

    Args:
        advance_slowly: called with (id, attempt, grammar, token) to advance a slow grammar outside
            the step loop.
        vocab_size: number of tokens that can be sampled.
    """

    def __init__(
        self, advance_slowly: Callable[[str, int, GrammarState, int], None], vocab_size: int
    ) -> None:
        self._advance_slowly = advance_slowly
        self._no_mask = b"\xff" * (-(-vocab_size // 32) * 4)
        self._grammars: dict[RequestKey, GrammarState] = {}

    def __len__(self) -> int:
        return len(self._grammars)

    def add(self, request_id: str, attempt: int, grammar: GrammarState) -> None:
        """Adds the state of a request whose matcher is ready, initially or after a slow token."""
        self._grammars[request_id, attempt] = grammar

    def drop(self, keys: Iterable[RequestKey]) -> None:
        """Removes the states of requests that have ended or continue with unconstrained text."""
        for key in keys:
            self._grammars.pop(key, None)

    def advance(self, sampled: Iterable[SampledTokens]) -> list[GrammarAdvance]:
        """Advances requests by the tokens sampled in one step; returns the outcomes in the same
        order."""
        return [self._advance(tokens) for tokens in sampled]

    def masks(
        self, rows: Sequence[RequestKey | None], drafts: Sequence[Sequence[int]] = ()
    ) -> bytes:
        """Returns the masks for the masked rows of a step. The results of all earlier steps must
        have been applied.

        Args:
            rows: request of each masked row; None if it has ended or was preempted in the meantime,
                so that its token is dropped and any token is allowed.
            drafts: drafts of each masked row; empty if there are none.
        """
        masks: list[bytes] = []
        for number, key in enumerate(rows):
            ahead = drafts[number] if drafts else ()
            if key is None:
                masks += [self._no_mask] * (1 + len(ahead))
            elif ahead:
                masks += self._grammars[key].walk(ahead)
            else:
                masks.append(self._grammars[key].mask)
        return b"".join(masks)

    def _advance(self, sampled: SampledTokens) -> GrammarAdvance:
        grammar = self._grammars[sampled.request_id, sampled.attempt]
        count = len(sampled.token_ids)
        for number, token_id in enumerate(sampled.token_ids, 1):
            if grammar.is_free:
                break
            if not _allows(grammar.mask, token_id):
                if sampled.are_proposals and number > 1:
                    return GrammarAdvance(number - 1, GrammarStatus.of(grammar))
                return GrammarAdvance(number, GrammarStatus.of(grammar), is_refused=True)
            if sampled.ends and number == count:
                break
            if grammar.is_slow:
                status = GrammarStatus.of(grammar)
                self._advance_slowly(sampled.request_id, sampled.attempt, grammar, token_id)
                return GrammarAdvance(number, status, is_pending=True)
            problem = grammar.advance(token_id)
            if problem is not None or grammar.is_complete:
                return GrammarAdvance(number, GrammarStatus.of(grammar), problem=problem)
        return GrammarAdvance(count, GrammarStatus.of(grammar))


def _allows(mask: bytes, token_id: int) -> bool:
    """Whether a mask (little-endian words) allows the token."""
    return bool(mask[token_id // 8] >> token_id % 8 & 1)
