"""Requests under a grammar: their grammar states, and the masks of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from worker.core.grammar.state import DrawnTokens, Followed, GrammarState, GrammarStatus

RequestKey = tuple[str, int]
"""A request's id and attempt."""


class GuidedRequests:
    """Grammar states of requests: takes the tokens of each step, and makes masks for the next.

    Args:
        advance_slowly: called with (id, attempt, grammar, token) to take a token outside of the
            step loop, for a grammar that a step must not wait for.
        vocab_size: number of tokens that a draw can yield.
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
        """Adds the state of a request whose matcher is ready, first or after a slow token."""
        self._grammars[request_id, attempt] = grammar

    def drop(self, keys: Iterable[RequestKey]) -> None:
        """Drops the states of requests that have ended."""
        for key in keys:
            self._grammars.pop(key, None)

    def follow(self, drawn: Iterable[DrawnTokens]) -> list[Followed]:
        """Takes the tokens that requests drew in one step; their outcomes, in the same order."""
        return [self._follow(one) for one in drawn]

    def masks(
        self, rows: Sequence[RequestKey | None], drafts: Sequence[Sequence[int]] = ()
    ) -> bytes:
        """Masks of the masked draws of a step, after the results of all earlier steps.

        Args:
            rows: request of each masked row; None where it has ended or was preempted meanwhile,
                so that its draw is dropped and anything is allowed.
            drafts: drafts of each masked row; empty where none may have any.
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

    def _follow(self, drawn: DrawnTokens) -> Followed:
        grammar = self._grammars[drawn.request_id, drawn.attempt]
        count = len(drawn.token_ids)
        for number, token_id in enumerate(drawn.token_ids, 1):
            if not _allows(grammar.mask, token_id):
                if drawn.are_proposals and number > 1:
                    return Followed(number - 1, GrammarStatus.of(grammar))
                return Followed(number, GrammarStatus.of(grammar), is_refused=True)
            if drawn.ends and number == count:
                break
            if grammar.is_slow:
                status = GrammarStatus.of(grammar)
                self._advance_slowly(drawn.request_id, drawn.attempt, grammar, token_id)
                return Followed(number, status, is_pending=True)
            problem = grammar.advance(token_id)
            if problem is not None or grammar.is_complete:
                return Followed(number, GrammarStatus.of(grammar), problem=problem)
        return Followed(count, GrammarStatus.of(grammar))


def _allows(mask: bytes, token_id: int) -> bool:
    """Whether a mask, little-endian words, has the token's bit."""
    return bool(mask[token_id // 8] >> token_id % 8 & 1)
