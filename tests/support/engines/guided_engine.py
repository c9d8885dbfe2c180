"""Engines with grammars over single letters, compiled in this process without a tokenizer."""

from __future__ import annotations

import string
from functools import cache

from tests.support.engines.engine_driver import Engine
from worker.core.grammar.xgrammar_backend import XGrammarBackend
from worker.frontend.grammar.process import grammar_key
from worker.protocol.messages import CompiledGrammar, Submit, SubmitBatch, Vocabulary

_LETTERS = [letter.encode() for letter in string.printable[:95]]
VOCAB_SIZE, EOS = 97, 7
"""Vocabulary size and end token of test checkpoints (tests.support.checkpoints.specimen)."""
TOKENS = [*_LETTERS[:EOS], b"", *_LETTERS[EOS:], b"ab"]


class GuidedEngine(Engine):
    """An engine whose model has these tokens."""

    def _with_grammar(self, submit: Submit) -> SubmitBatch:
        params = submit.sampling.structured_outputs
        if params is None:
            return SubmitBatch(submits=[submit])
        backend, vocabulary = _backend()
        submit.grammar = grammar_key(params)
        compiled = CompiledGrammar(submit.grammar, "xgrammar", backend.compile(params))
        return SubmitBatch(submits=[submit], grammars=[compiled], vocabulary=vocabulary)


def text_of(token_ids: list[int]) -> str:
    """Text of the tokens; the end token has none."""
    return b"".join(TOKENS[token] for token in token_ids).decode()


@cache
def _backend() -> tuple[XGrammarBackend, Vocabulary]:
    backend = XGrammarBackend.of_tokens(TOKENS, [EOS])
    return backend, Vocabulary(TOKENS, [EOS], backend.serialize())
