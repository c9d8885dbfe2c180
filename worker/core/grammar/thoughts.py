"""Matcher for reasoning models: free reasoning, then text that matches the grammar."""

from __future__ import annotations

from collections.abc import Iterable

from worker.core.grammar.base import Matcher, Words, words_of
from worker.protocol.structured import ThoughtTokens


class ThoughtMatcher:
    """Matcher that allows any tokens during reasoning, followed by a grammar.

    End tokens are not allowed during reasoning, since the structured part would be missing.

    Args:
        matcher: matcher of the grammar, before its first token.
        thought: tokens that begin and end reasoning.
        eos_token_ids: the model's end tokens.
        vocab_size: number of tokens that can be sampled.
    """

    def __init__(
        self,
        matcher: Matcher,
        thought: ThoughtTokens,
        *,
        eos_token_ids: Iterable[int],
        vocab_size: int,
    ) -> None:
        self._matcher = matcher
        self._thought = thought
        self._thinking: Words = ~words_of(list(eos_token_ids), vocab_size)
        self._opening: Words = words_of([thought.opening], vocab_size)
        self._is_open = thought.is_open
        self._thought_ids: list[int] = []
        """Tokens of the reasoning, including its opening and closing tokens."""
        self._num_formed = 0
        """Tokens that the grammar has accepted."""

    def accept(self, token_id: int) -> bool:
        """Advances by one token; returns False if it is not allowed."""
        if self._is_open:
            self._is_open = not self._closes(token_id)
            self._thought_ids.append(token_id)
            return True
        if self._may_open and token_id == self._thought.opening:
            self._is_open = True
            self._thought_ids.append(token_id)
            return True
        if not self._matcher.accept(token_id):
            return False
        self._num_formed += 1
        return True

    def rollback(self, count: int) -> None:
        """Undoes the last `count` tokens."""
        formed = min(count, self._num_formed)
        if formed:
            self._matcher.rollback(formed)
            self._num_formed -= formed
        if count > formed:
            del self._thought_ids[formed - count :]
            self._is_open = self._thought.is_open or bool(self._thought_ids)

    def may_end(self) -> bool:
        """Whether reasoning has ended, followed by a complete text of the grammar."""
        return not self._is_open and self._matcher.may_end()

    def fill(self, words: Words) -> None:
        """Writes the mask of the next token, including end tokens if the text may end."""
        if self._is_open:
            words[:] = self._thinking
            return
        self._matcher.fill(words)
        if self._may_open:
            words |= self._opening

    def _closes(self, token_id: int) -> bool:
        """Whether this token ends the reasoning."""
        if token_id != self._thought.closing:
            return False
        before = list(self._thought.before)
        return not before or self._thought_ids[-len(before) :] == before

    @property
    def _may_open(self) -> bool:
        """Whether reasoning may begin: no token has been accepted yet."""
        return not self._thought.is_open and not self._thought_ids and not self._num_formed
