"""State of requests in their grammars, and the values in which the scheduler is told of it.

The scheduler neither calls a matcher nor waits for one. It tells which tokens were drawn
(`DrawnTokens`), the engine core takes them through the matchers and returns the outcomes
(`Followed`). These are plain values, so that a recorded run of the scheduler can be replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class GrammarProblem(NamedTuple):
    """Problem for which a request cannot continue under its grammar."""

    message: str
    status: int
    """HTTP status: 400 where the request contradicts itself or its grammar is too heavy, 500 where
    the worker fails."""


class GrammarStatus(NamedTuple):
    """Status of a request in its grammar, for the scheduler."""

    is_complete: bool = False
    """Whether the grammar leaves nothing to draw but an end token, or not even that."""
    is_slow: bool = False
    """Whether the grammar takes so long for the next token that a step must not wait for it."""
    may_draft: bool = True
    """Whether the grammar is fast enough to make masks of drafts."""

    @classmethod
    def of(cls, grammar: GrammarState) -> GrammarStatus:
        """Present status of a grammar state."""
        return cls(grammar.is_complete, grammar.is_slow, grammar.may_draft)


class DrawnTokens(NamedTuple):
    """Tokens that a step drew for one request under a grammar."""

    request_id: str
    attempt: int
    token_ids: list[int]
    """Drawn tokens, up to the first that ends the request whatever its grammar says."""
    ends: bool
    """Whether the last token ends the request; the grammar need not take it, but has to allow
    it."""
    are_proposals: bool = False
    """Whether all but the first count only as far as the grammar allows them (block diffusion)."""


class Followed(NamedTuple):
    """Outcome of the grammar for the tokens drawn for one request."""

    num_taken: int
    """Number of tokens that count; after the last, the request continues, ends or waits."""
    status: GrammarStatus
    is_refused: bool = False
    """Whether the grammar does not allow the last token that counts."""
    problem: GrammarProblem | None = None
    """Problem for which the grammar cannot continue after that token; None if it can."""
    is_pending: bool = False
    """Whether the grammar, which is slow, has yet to take that token: `Scheduler.provide`
    follows."""


class GrammarState(Protocol):
    """State of one request in its grammar, which survives preemption.

    `advance` takes every token that the request draws; `mask` is for the draw that follows.
    """

    @property
    def mask(self) -> bytes:
        """Mask of the next draw: ceil(vocab / 32) little-endian words, in which bit 1 allows."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether the grammar leaves nothing to draw but an end token, or not even that."""
        ...

    @property
    def is_slow(self) -> bool:
        """Whether `advance` takes so long that a step must not wait for it."""
        ...

    @property
    def may_draft(self) -> bool:
        """Whether `walk` is fast enough to make masks of drafts."""
        ...

    def walk(self, drafts: Sequence[int]) -> list[bytes]:
        """Masks of the next draw and of the draw after each draft; the state does not change.

        After a draft that the grammar does not allow, or that ends the text, masks allow
        everything: such a draft is not accepted, or is the last token.
        """
        ...

    def advance(self, token_id: int) -> GrammarProblem | None:
        """Takes one drawn token and makes the next mask; returns a problem if it cannot
        continue."""
        ...
