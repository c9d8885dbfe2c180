"""What the scheduler knows of a request's grammar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class GrammarProblem(NamedTuple):
    """Why a request cannot go on under its grammar."""

    message: str
    status: int
    """400 where the request contradicts itself or its grammar is too heavy, 500 where the worker
    fails."""


class GrammarState(Protocol):
    """Where one request stands in its grammar. It belongs to the request and survives preemption.

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
        """Whether `walk` is fast enough to look ahead with."""
        ...

    def walk(self, drafts: Sequence[int]) -> list[bytes]:
        """Masks of the next draw and of those after each draft, were they drawn; stays in place.

        After a draft that it does not allow, or that ends the text, masks allow everything: such
        a draft is never accepted, or the last.
        """
        ...

    def advance(self, token_id: int) -> GrammarProblem | None:
        """Takes one drawn token and makes the next mask; why it cannot go on, None if it can."""
        ...
