"""Grammar states of requests, and the plain values that represent them in the scheduler.

The scheduler neither calls a matcher nor waits for one. It returns the sampled tokens
(`SampledTokens`); the engine core advances the matchers and passes the outcomes (`GrammarAdvance`)
back. Since these are plain values, a recorded run of the scheduler can be replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class GrammarProblem(NamedTuple):
    """Reason why a request cannot continue with its grammar."""

    message: str
    status: int
    """HTTP status: 400 for contradictory parameters or a grammar that is too heavy, 500 for an
    internal error."""


class GrammarStatus(NamedTuple):
    """Status of a request's grammar, for the scheduler."""

    is_complete: bool = False
    """Whether the grammar allows no further token, or only an EOS token."""
    is_slow: bool = False
    """Whether the next mask takes so long that steps must not wait for it."""
    may_draft: bool = True
    """Whether masks of drafts can be computed fast enough."""
    is_free: bool = False
    """Whether free text follows, which needs no masks."""

    @classmethod
    def of(cls, grammar: GrammarState) -> GrammarStatus:
        """Current status of a grammar state."""
        return cls(grammar.is_complete, grammar.is_slow, grammar.may_draft, grammar.is_free)


class SampledTokens(NamedTuple):
    """Tokens sampled in a step for a request with a grammar."""

    request_id: str
    attempt: int
    token_ids: list[int]
    """Sampled tokens, up to the first one that ends the request regardless of its grammar."""
    ends: bool
    """Whether the last token ends the request. The grammar must allow it but does not advance by
    it."""
    are_proposals: bool = False
    """Whether all tokens but the first are proposals (block diffusion). Only those that the grammar
    allows are used."""


class GrammarAdvance(NamedTuple):
    """Outcome of advancing a request's grammar by its sampled tokens."""

    num_taken: int
    """Number of tokens used. After the last of them, the request continues, ends or waits."""
    status: GrammarStatus
    is_refused: bool = False
    """Whether the grammar does not allow the last used token."""
    problem: GrammarProblem | None = None
    """Reason why the grammar cannot continue after the last used token; None if it can."""
    is_pending: bool = False
    """Whether the grammar is slow and has not accepted the last used token yet; once it has,
    `Scheduler.provide` is called."""


class GrammarState(Protocol):
    """Grammar state of one request, which is kept during preemption.

    `advance` is called for every sampled token until free text follows; `mask` is the mask for the
    next token.
    """

    @property
    def mask(self) -> bytes:
        """Mask for the next token: ceil(vocab / 32) little-endian words, in which a set bit allows
        a token."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether the grammar allows no further token, or only an EOS token."""
        ...

    @property
    def is_slow(self) -> bool:
        """Whether `advance` takes so long that steps must not wait for it."""
        ...

    @property
    def may_draft(self) -> bool:
        """Whether `walk` can compute masks of drafts fast enough."""
        ...

    @property
    def is_free(self) -> bool:
        """Whether free text follows, which needs no masks and no further calls."""
        ...

    def walk(self, drafts: Sequence[int]) -> list[bytes]:
        """Masks for the next token and for the token after each draft; the state does not change.

        After a draft that the grammar does not allow, or that ends the text, masks allow all
        tokens: such a draft is rejected or is the last token.
        """
        ...

    def advance(self, token_id: int) -> GrammarProblem | None:
        """Accepts a sampled token and computes the next mask. Returns a problem, or None if
        there is none."""
        ...
