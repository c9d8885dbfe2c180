"""What is left to do for a request whose grammar takes long."""

from __future__ import annotations

from typing import NamedTuple

from worker.core.grammar.state import GrammarState


class SlowGrammar(NamedTuple):
    """A token for a grammar that takes long over it."""

    request_id: str
    attempt: int
    grammar: GrammarState
    token_id: int
