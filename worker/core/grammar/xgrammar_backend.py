"""Grammar backend that uses xgrammar."""

from __future__ import annotations

import json
from typing import Any

from worker.core.grammar.base import MAX_WHITESPACE, GrammarError, LoadedGrammar, Words
from worker.core.grammar.exactness import inexact_keyword
from worker.core.grammar.json_schema.exact import Schema, exact_schema
from worker.core.grammar.native import XGrammarCore, load_core
from worker.core.grammar.tags import modern_tag, with_schemas
from worker.protocol.structured import StructuredOutputsParams

_RAW_BYTES = 0
"""VocabType of xgrammar for tokens given as raw bytes."""

NOT_ENFORCED = "xgrammar does not enforce"
"""Prefix of error messages for schemas that llguidance may be able to enforce."""


class XGrammarBackend:
    """GrammarBackend for xgrammar. Grammars can be compiled in one process and loaded in another.

    Args:
        info: the bindings' TokenizerInfo, with the vocabulary.
        core: the bindings.
    """

    def __init__(self, info: Any, core: XGrammarCore) -> None:
        self._info = info
        self._core = core
        self._compiler: Any = None

    @staticmethod
    def of_tokens(tokens: list[bytes], eos_token_ids: list[int]) -> XGrammarBackend:
        """Creates a backend from the bytes of each token; empty tokens are never sampled."""
        core = load_core()
        info = core.bindings.TokenizerInfo(tokens, _RAW_BYTES, len(tokens), eos_token_ids, False)
        return XGrammarBackend(info, core)

    @staticmethod
    def of_serialized(text: str) -> XGrammarBackend:
        """Creates a backend from the result of `serialize` in another process."""
        core = load_core()
        return XGrammarBackend(core.bindings.TokenizerInfo.deserialize_json(text), core)

    def serialize(self) -> str:
        """The vocabulary, serialized by xgrammar for `of_serialized`."""
        return str(self._info.serialize_json())

    def compile(self, params: StructuredOutputsParams) -> str:
        """Compiles a grammar to a payload for `load`. Raises GrammarError."""
        try:
            return str(self._compiled(params).serialize_json())
        except RuntimeError as error:
            raise GrammarError(_reason(error)) from error

    def load(self, payload: str) -> LoadedGrammar:
        """Loads a payload of `compile`, in this process or another. Raises GrammarError."""
        try:
            compiled = self._core.bindings.CompiledGrammar.deserialize_json(payload, self._info)
        except RuntimeError as error:
            raise GrammarError(_reason(error)) from error
        return lambda: _Matcher(compiled, self._core)

    def _compiled(self, params: StructuredOutputsParams) -> Any:
        if self._compiler is None:
            no_cache = (1, False, -1)  # threads, cache, cache limit
            self._compiler = self._core.bindings.GrammarCompiler(self._info, *no_cache)
        compiler, kind, text = self._compiler, params.kind, params.text
        if kind in ("json", "json_object"):
            schema = _exact(json.loads(text)) if kind == "json" else {"type": "object"}
            any_whitespace = not params.disable_any_whitespace
            limit = MAX_WHITESPACE if any_whitespace else None
            separators = None if any_whitespace else (",", ":")
            return compiler.compile_json_schema(
                json.dumps(schema), any_whitespace, None, separators, False, limit, False
            )
        if kind == "regex":
            return compiler.compile_regex(text)
        if kind == "structural_tag":
            tag = with_schemas(modern_tag(text), _exact)
            return compiler.compile_structural_tag(json.dumps(tag))
        if kind == "choice":
            literals = " | ".join(_ebnf_literal(choice) for choice in params.choice or ())
            return compiler.compile_grammar_from_strings(f"root ::= {literals}", "root")
        if "::=" in text:
            return compiler.compile_grammar_from_strings(text, "root")
        return compiler.compile_lark(text, [], [])


class _Matcher:
    """Matcher of one request (`worker.core.grammar.base.Matcher`)."""

    def __init__(self, compiled: Any, core: XGrammarCore) -> None:
        self._handle = core.bindings.GrammarMatcher(compiled, None, False, 0, None)
        self._core = core

    def accept(self, token_id: int) -> bool:
        """Advances by one token; returns False if the grammar does not allow it."""
        return bool(self._handle.accept_token(token_id, False))

    def rollback(self, count: int) -> None:
        """Undoes the last `count` tokens."""
        self._handle.rollback(count)

    def may_end(self) -> bool:
        """Whether the tokens so far form a complete text of the grammar."""
        return bool(self._handle.is_completed())

    def fill(self, words: Words) -> None:
        """Writes the mask for the next token, including EOS tokens if the text may end."""
        # The library writes nothing if every token is allowed.
        words.fill(-1)
        self._handle.fill_next_token_bitmask(self._core.view(words), 0, False)


def _exact(schema: Any, style: str = "json") -> Schema:
    """Rewrites a schema. Raises GrammarError if xgrammar would not enforce all of it."""
    if style != "json":  # xgrammar allows closing tags within texts
        raise GrammarError(f"{NOT_ENFORCED} JSON schemas with style '{style}'")
    rewritten = exact_schema(schema)
    if keyword := inexact_keyword(rewritten):
        raise GrammarError(f"{NOT_ENFORCED} '{keyword}' of JSON schemas")
    return rewritten


def _ebnf_literal(text: str) -> str:
    escaped = "".join(
        character
        if character.isascii() and character.isprintable() and character not in '"\\'
        else f"\\U{ord(character):08X}"
        for character in text
    )
    return f'"{escaped}"'


def _reason(error: RuntimeError) -> str:
    """Message of an error, without the location in xgrammar's source that it starts with."""
    text = str(error).strip()
    head, separator, rest = text.partition(": ")
    return rest if separator and ".cc" in head else text
