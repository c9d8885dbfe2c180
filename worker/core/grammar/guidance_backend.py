"""Grammar backend that uses llguidance, which bounds the work per token."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from typing import Any

from worker.core.grammar.base import MAX_WHITESPACE, GrammarError, LoadedGrammar, Words
from worker.core.grammar.json_schema.exact import exact_schema
from worker.core.grammar.lark_tags import json_options, lark_of
from worker.core.grammar.tags import modern_tag
from worker.protocol.structured import StructuredOutputsParams


class GuidanceBackend:
    """GrammarBackend for llguidance: `compile` converts grammars to its format, and `load` compiles
    them.

    Args:
        tokens: bytes of each token; empty tokens are never sampled.
        eos_token_ids: the model's EOS tokens.
    """

    def __init__(self, tokens: Sequence[bytes], eos_token_ids: Sequence[int]) -> None:
        self._library = _import_library()
        # The library requires an EOS token; for models without one, use a token that is never
        # sampled.
        ends = list(eos_token_ids) or [next((i for i, t in enumerate(tokens) if not t), 0)]
        # In forced text, the library allows a single token, chosen by `tokenize`. Its default
        # tokenizes into bytes, so that a key would take one step per letter.
        longest = self._library.LLTokenizer(_TokenList(tokens, ends), eos_token=ends, slices=[])
        vocabulary = _TokenList(tokens, ends, longest.greedy_tokenize)
        self._tokenizer = self._library.LLTokenizer(vocabulary, eos_token=ends)

    def compile(self, params: StructuredOutputsParams) -> str:
        """Compiles a grammar to a payload for `load`. Raises GrammarError."""
        try:
            grammar = self._grammar(params)
        except ValueError as error:
            raise GrammarError(str(error)) from error
        problem: str = self._library.LLMatcher.validate_grammar(grammar, self._tokenizer)
        if problem and not problem.startswith("WARNING"):
            raise GrammarError(_named(problem))
        return grammar

    def load(self, payload: str) -> LoadedGrammar:
        """Loads a payload of `compile`, in this process or another. Raises GrammarError."""
        matcher = self._library.LLMatcher(self._tokenizer, payload, log_level=0)
        if matcher.is_error():
            raise GrammarError(matcher.get_error())
        return lambda: _Matcher(matcher.deep_copy())

    def _grammar(self, params: StructuredOutputsParams) -> str:
        compiler, kind, text = self._library.LLMatcher, params.kind, params.text
        if kind in ("json", "json_object"):
            schema = exact_schema(json.loads(text)) if kind == "json" else {"type": "object"}
            spaces = None if params.disable_any_whitespace else MAX_WHITESPACE
            return str(
                compiler.grammar_from_json_schema(
                    json.dumps(schema), overrides=json_options(spaces)
                )
            )
        if kind == "regex":
            return str(compiler.grammar_from_regex(text))
        if kind == "choice":
            literals = " | ".join(json.dumps(choice) for choice in params.choice or ())
            return str(compiler.grammar_from_lark(f"start: {literals}"))
        if kind == "structural_tag":
            return str(compiler.grammar_from_lark(lark_of(modern_tag(text))))
        if "::=" in text:
            text = importlib.import_module("llguidance.gbnf_to_lark").gbnf_to_lark(text)
        return str(compiler.grammar_from_lark(text))


class _TokenList:
    """The vocabulary in the form expected by llguidance.

    Args:
        tokens: bytes of each token; empty tokens are never sampled.
        ends: the EOS tokens.
        tokenize: tokenizes text that a grammar forces.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self,
        tokens: Sequence[bytes],
        ends: Sequence[int],
        tokenize: Callable[[str], list[int]] = lambda text: [],
    ) -> None:
        self.tokens = list(tokens)
        self.eos_token_id = ends[0]
        self.special_token_ids = [
            token_id for token_id, token in enumerate(tokens) if not token or token_id in ends
        ]
        self._tokenize = tokenize

    def __call__(self, text: str) -> list[int]:
        """Token ids of a text."""
        return self._tokenize(text)


class _Matcher:
    """Matcher of one request (`worker.core.grammar.base.Matcher`)."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def accept(self, token_id: int) -> bool:
        """Advances by one token; returns False if the grammar does not allow it."""
        return bool(self._handle.consume_token(token_id))

    def rollback(self, count: int) -> None:
        """Undoes the last `count` tokens."""
        if not self._handle.rollback(count):
            raise GrammarError(self._handle.get_error())

    def may_end(self) -> bool:
        """Whether the tokens so far form a complete text of the grammar."""
        return bool(self._handle.is_accepting())

    def fill(self, words: Words) -> None:
        """Writes the mask for the next token, including EOS tokens if the text may end."""
        self._handle.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._handle.is_error():
            raise GrammarError(self._handle.get_error())


def _import_library() -> Any:
    try:
        return importlib.import_module("llguidance")
    except ImportError as error:
        raise GrammarError("llguidance is not installed: pip install llguidance") from error


_KEYWORDS = (
    ("circular references with sibling", "$ref"),
    ("patternProperty regexes", "patternProperties"),
    ("oneOf constraints", "oneOf"),
)


def _named(problem: str) -> str:
    """The library's message, with the keyword's name added if it is missing."""
    found = next((name for text, name in _KEYWORDS if text in problem), None)
    return problem if found is None else f"JSON schema: {found}: {problem}"
