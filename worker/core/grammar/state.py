"""Where requests stand in their grammars: the matcher's side, and what the scheduler knows of it.

The scheduler neither asks a matcher nor waits for one. It says which tokens were drawn
(`DrawnTokens`), the engine takes them through the matchers, and reports the outcome
(`Followed`): values, so that a recorded run of the scheduler can be replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class GrammarProblem(NamedTuple):
    """Why a request cannot continue under its grammar."""

    message: str
    status: int
    """400 where the request contradicts itself or its grammar is too heavy, 500 where the worker
    fails."""


class GrammarStatus(NamedTuple):
    """What the scheduler knows of where a request stands in its grammar."""

    is_complete: bool = False
    """Whether the grammar leaves nothing to draw but an end token, or not even that."""
    is_slow: bool = False
    """Whether its next token takes so long that a step must not wait for it."""
    may_draft: bool = True
    """Whether it is fast enough to make masks of drafts."""

    @classmethod
    def of(cls, grammar: GrammarState) -> GrammarStatus:
        """The status of a grammar's state as it is now."""
        return cls(grammar.is_complete, grammar.is_slow, grammar.may_draft)


class DrawnTokens(NamedTuple):
    """What a step drew for one request under a grammar."""

    request_id: str
    attempt: int
    token_ids: list[int]
    """Up to the first that ends it whatever its grammar says, if one does."""
    ends: bool
    """Whether the last of them does: its grammar need only allow it."""
    are_proposals: bool = False
    """Whether they count only as far as its grammar allows them, the first apart (blocks)."""


class Followed(NamedTuple):
    """What came of the tokens drawn for one request under a grammar."""

    num_taken: int
    """Of the tokens; with the last taken, the request continues, or ends, or waits."""
    status: GrammarStatus
    is_refused: bool = False
    """Whether the last of them is one that its grammar does not allow."""
    problem: GrammarProblem | None = None
    """Why its grammar cannot continue after the last."""
    is_pending: bool = False
    """Whether its grammar, which is slow, is still to take the last: `provide` brings the
    outcome."""


class GrammarState(Protocol):
    """The state of one request in its grammar. It belongs to the request and survives preemption.

    Its life: `advance` for every token that the request draws; `mask` is for the draw that follows.
    """

    @property
    def mask(self) -> bytes:
        """What the next draw may yield: ceil(vocab / 32) little-endian words, bit 1 allows."""
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
        """Masks of the next draw and of those after each draft, were they drawn; the state stays as
        it is.

        After a draft that it does not allow, or that ends the text, masks allow everything: such
        a draft is never accepted, or the last.
        """
        ...

    def advance(self, token_id: int) -> GrammarProblem | None:
        """Takes one drawn token and makes the next mask; why it cannot continue, None if it can."""
        ...
