"""Matcher for reasoning models: reasoning, then free text or text that matches a grammar."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from worker.core.grammar.base import Matcher, Words, words_of
from worker.protocol.structured import ThoughtTokens


class ThoughtMatcher:
    """Matcher of reasoning with a maximum number of tokens, followed by a grammar or free text.

    If a grammar follows, EOS tokens are not allowed during reasoning, since the structured part
    would be missing. When reasoning reaches its maximum, only the tokens that end it are allowed.

    Args:
        matcher: matcher of the grammar, before its first token; None for free text.
        thought: tokens that begin and end reasoning, and its maximum number of tokens.
        eos_token_ids: the model's EOS tokens.
        vocab_size: number of tokens that can be sampled.
    """

    def __init__(
        self,
        matcher: Matcher | None,
        thought: ThoughtTokens,
        *,
        eos_token_ids: Iterable[int],
        vocab_size: int,
    ) -> None:
        self._matcher = matcher
        self._thought = thought
        self._vocab_size = vocab_size
        ends: Words = words_of(list(eos_token_ids), vocab_size)
        self._thinking: Words = ~(np.zeros_like(ends) if matcher is None else ends)
        self._opening: Words = words_of([thought.opening], vocab_size)
        self._is_open = thought.is_open
        self._thought_ids: list[int] = []
        """Tokens of the reasoning, including its opening and closing tokens."""
        self._num_formed = 0
        """Number of tokens accepted after the reasoning."""

    def accept(self, token_id: int) -> bool:
        """Advances by one token; returns False if it is not allowed."""
        if self._is_open:
            if self._forced() not in (None, token_id):
                return False
            self._is_open = not self._closes(token_id)
            self._thought_ids.append(token_id)
            return True
        if self._may_open and token_id == self._thought.opening:
            self._is_open = True
            self._thought_ids.append(token_id)
            return True
        if self._matcher is not None and not self._matcher.accept(token_id):
            return False
        self._num_formed += 1
        return True

    def rollback(self, count: int) -> None:
        """Undoes the last `count` tokens."""
        formed = min(count, self._num_formed)
        if formed:
            if self._matcher is not None:
                self._matcher.rollback(formed)
            self._num_formed -= formed
        if count > formed:
            del self._thought_ids[formed - count :]
            self._is_open = self._thought.is_open or bool(self._thought_ids)

    def may_end(self) -> bool:
        """Whether the text may end. With a grammar: after a complete text of the grammar. With free
        text: anywhere, unless reasoning has reached its maximum and has not been closed yet."""
        if self._matcher is None:
            return not self._is_open or self._forced() is None
        return not self._is_open and self._matcher.may_end()

    @property
    def is_free(self) -> bool:
        """Whether free text follows, because reasoning has ended or can no longer begin."""
        return self._matcher is None and not self._is_open and not self._may_open

    def fill(self, words: Words) -> None:
        """Writes the mask for the next token, including EOS tokens if the text may end."""
        if self._is_open:
            forced = self._forced()
            words[:] = self._thinking if forced is None else words_of([forced], self._vocab_size)
        elif self._matcher is None:
            words[:] = -1
        else:
            self._matcher.fill(words)
            if self._may_open:
                words |= self._opening

    def _closes(self, token_id: int) -> bool:
        """Whether `token_id`, as the next token, ends the reasoning."""
        if token_id != self._thought.closing:
            return False
        before = list(self._thought.before)
        return not before or self._thought_ids[-len(before) :] == before

    def _forced(self) -> int | None:
        """Next token of the sequence that ends reasoning, once it has reached its maximum; None
        before that."""
        thought, ids = self._thought, self._thought_ids
        if thought.budget is None:
            return None
        limit = thought.budget + (not thought.is_open)  # the opening token is not counted
        num_over = len(ids) - limit
        if num_over < 0:
            return None
        ending = [*thought.leading, *thought.before, thought.closing]
        # The reasoning may already be ending by itself.
        begun = ids[:limit]
        lengths = range(min(len(ending) - 1, limit), -1, -1)
        num_begun = next(n for n in lengths if begun[limit - n :] == ending[:n])
        return ending[num_begun + num_over]

    @property
    def _may_open(self) -> bool:
        """Whether reasoning may begin, which is only possible before the first token."""
        return not self._thought.is_open and not self._thought_ids and not self._num_formed
