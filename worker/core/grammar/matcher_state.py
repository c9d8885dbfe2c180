"""Advances one request through its grammar and provides the mask for its next token."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence

import numpy as np

from worker.core.grammar.base import (
    GrammarError,
    GrammarFault,
    Matcher,
    Words,
    shortened,
    words_of,
)
from worker.core.grammar.state import GrammarProblem
from worker.core.grammar.thoughts import ThoughtMatcher
from worker.protocol.sampling import SamplingParams

logger = logging.getLogger(__name__)

FREE_S = 0.02
"""Time per token, in seconds, that is not charged. Time beyond it is charged to the request's
credit."""
CREDIT_S = 1.0
"""Total time in excess of FREE_S, in seconds, after which the request fails."""
SLOW_S = 0.01
"""Time taken by the last token, in seconds, above which a grammar counts as slow. Steps do not wait
for a slow grammar, and its request is held until the next mask is ready."""
_PAUSE_TOKENS = 32
"""Number of tokens for which a request gets no drafts after computing the masks of its drafts
(`MatcherState.walk`) took more than SLOW_S; doubled each further time. A step waits for these
masks: 10 ms every 32 tokens cost 0.3 ms per token."""


class MatcherState:
    """GrammarState of one request, using a matcher.

    EOS tokens: if the text may either end or continue, the mask allows both, unless `ignore_eos` or
    `min_tokens` forbids ending. If it can only end, the request is complete and nothing is sampled.

    Args:
        matcher: matcher of the grammar, before the first token.
        sampling: sampling parameters of the request.
        eos_token_ids: the model's EOS tokens.
        vocab_size: number of tokens that can be sampled.
        output: tokens sampled by an earlier attempt.

    Raises:
        GrammarError: `allowed_token_ids` has no token to continue with.
        GrammarFault: `output` does not match the grammar.
    """

    def __init__(
        self,
        matcher: Matcher,
        sampling: SamplingParams,
        *,
        eos_token_ids: Iterable[int],
        vocab_size: int,
        output: Iterable[int] = (),
    ) -> None:
        self.is_complete = False
        """Whether the grammar allows no further token, or only an EOS token."""
        self.is_slow = False
        """Whether the last `advance` took so long that steps must not wait for the next one."""
        self.mask = b""
        """Mask for the next token: ceil(vocab / 32) little-endian words, in which a set bit allows
        a token."""
        self._matcher = matcher
        self._words: Words = np.zeros(-(-vocab_size // 32), dtype=np.int32)
        ends = words_of(list(eos_token_ids), vocab_size)
        self._no_ends = ~ends
        if vocab_size % 32:  # libraries may set bits beyond the vocabulary
            self._no_ends[-1] &= (1 << vocab_size % 32) - 1
        allowed = sampling.allowed_token_ids
        self._allowed = None if allowed is None else words_of(list(allowed), vocab_size)
        self._min_tokens = sampling.min_tokens
        self._ignore_eos = sampling.ignore_eos
        self._num_output = 0
        self._pause_tokens = _PAUSE_TOKENS
        """Number of tokens without drafts after the next slow `walk`."""
        self._next_walk_at = 0
        """Number of output tokens at which the request may draft again."""
        self._spent_s = 0.0
        for token_id in output:
            self._accept(token_id)
        self._fill()

    @property
    def is_free(self) -> bool:
        """Whether free text follows, which needs no masks: the ranks also apply `min_tokens` and
        `allowed_token_ids`. With `ignore_eos`, masks remain necessary to exclude EOS tokens."""
        matcher = self._matcher
        return isinstance(matcher, ThoughtMatcher) and matcher.is_free and not self._ignore_eos

    @property
    def may_draft(self) -> bool:
        """Whether masks of drafts can be computed fast enough, according to previous walks."""
        return self._num_output >= self._next_walk_at

    def walk(self, drafts: Sequence[int]) -> list[bytes]:
        """Masks for the next token and for the token after each draft; the state does
        not change."""
        masks = [self.mask]
        began, state = time.thread_time(), (self.mask, self._num_output)
        num_taken = 0
        try:
            for token_id in drafts:
                if self.is_complete or not self._can_continue_with(token_id):
                    break
                self._accept(token_id)
                num_taken += 1
                self._fill()
                masks.append(self.mask)
        except (GrammarError, GrammarFault):
            pass  # if accepted, this draft would end the request
        finally:
            if num_taken:
                self._matcher.rollback(num_taken)
            self.mask, self._num_output = state
            self.is_complete = False
        if time.thread_time() - began > SLOW_S:
            self._next_walk_at = self._num_output + self._pause_tokens
            self._pause_tokens *= 2
        return masks + [b"\xff" * len(self.mask)] * (1 + len(drafts) - len(masks))

    def advance(self, token_id: int) -> GrammarProblem | None:
        """Accepts a sampled token and computes the next mask. Returns a problem, or None if
        there is none."""
        began = time.thread_time()
        try:
            self._accept(token_id)
            self._fill()
        except GrammarError as error:
            return GrammarProblem(str(error), 400)
        except Exception as error:
            # A library's error with one grammar must not crash the whole group.
            logger.exception("internal error while advancing a grammar")
            return GrammarProblem(shortened(f"structured_outputs: internal error: {error}"), 500)
        took = time.thread_time() - began
        self.is_slow = took > SLOW_S
        self._spent_s = max(0.0, self._spent_s + took - FREE_S)
        if self._spent_s > CREDIT_S:
            problem = "structured_outputs: the grammar is too ambiguous: simplify it"
            return GrammarProblem(problem, 400)
        return None

    def _can_continue_with(self, token_id: int) -> bool:
        """Whether a token is allowed and is not an EOS token."""
        word, bit = divmod(token_id, 32)
        allowed = np.frombuffer(self.mask, dtype="<i4")[word] & self._no_ends[word]
        return bool(int(allowed) >> bit & 1)

    def _accept(self, token_id: int) -> None:
        if not self._matcher.accept(token_id):
            raise GrammarFault(f"the grammar cannot continue with token {token_id}")
        self._num_output += 1

    def _fill(self) -> None:
        words = self._words
        self._matcher.fill(words)
        self.is_complete = False
        if self._matcher.may_end():
            going_on = words & self._no_ends
            self.is_complete = not going_on.any()
            if self._ignore_eos or self._num_output < self._min_tokens:
                words = going_on
        if self._allowed is not None:
            words = words & self._allowed
            if not self.is_complete and not words.any():
                raise GrammarError(
                    "structured_outputs: allowed_token_ids has no token with which the grammar "
                    "can continue"
                )
        self.mask = words.tobytes()
