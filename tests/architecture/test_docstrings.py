"""Docstrings begin with a noun or a verb, so that each can be read by itself, in plain words."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.support.sources import FLOORS, Source, sources

RELATIONS = frozenset(
    {
        *("About", "Above", "After", "Against", "As", "At", "Before", "Behind", "Below", "Beside"),
        *("Between", "By", "For", "From", "In", "Likewise", "Of", "On", "Per", "Since", "Than"),
        *("These", "Those", "To", "Until", "Who", "Whom", "Whose", "With", "Within", "Without"),
    }
)
"""First words that relate something to another thing instead of saying what it is."""
PHRASES = {
    r"\b(?:None|NaN|[Ee]mpty|False|[Ii]nfinite) without\b": "None if there is no ...",
    r"\b[Rr]uns .{0,20} to its end\b": "to completion",
    r"\bfrom [A-Z0-9_`]+ on\b": "starting with ..., for ... or more",
    r"\bevents? without effect\b": "no-op event",
    r"(?:normal|quant|special|initial|optim|serial|recogn|minim|maxim)is(?:e|ing|at)": "-ize",
    r"\b(?:neighbour|favour|colour|behaviour)": "US spelling",
    r"\b(?:None|[Ee]mpty|0|-1) without (?:any|one)\b": "if there is none, if X is disabled",
    r"\b(?:None|[Ee]mpty) for (?:none\b|no\b(?! limit))": "if there is none",
    r"[;:,] else (?:None|empty|0|-1|1)\b": "otherwise",
    r"\btakes? the (?:way|path) of\b": "uses, goes through the same",
    r"\bwhole on (?:every|each) rank\b": "replicated on every rank",
    r"\bin any case\b": "always, unconditionally",
    r"\b(?:keys|queries|rows|vectors) of length 1\b": "L2-normalized",
    r"\b(?:heads|keys|queries|channels|warps) of a program\b": "per program",
    r", from [01](?=[.;,)])": "0-based, 1-based",
    r"\blikeliest\b": "most likely",
    r"\b(?:matrix|dense|FP8) products?\b": "matmul",
    r"\bprompts? under way\b": "running prefills",
    r"\bNo torch\.": "Does not import torch",
    r"\bmathematics\b": "outputs, computation",
    r"\bstart-up\b": "startup",
}
"""Patterns of phrases that readers stop at, and what to say instead."""


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    found = [
        f"{source.path}:{line}: {text.splitlines()[0]}"
        for source in sources(*FLOORS, "deploy", "tests/campaigns", "tests/support")
        for line, text in _docstrings(source)
        if text.split(maxsplit=1)[0].strip(".,:;") in RELATIONS
    ]
    assert found == []


def test_docstrings_have_no_untranslated_phrases() -> None:
    found = [
        f"{source.path}:{line}: {match.group()!r}, say: {instead}"
        for source in sources(*FLOORS, "deploy")
        for line, text in _docstrings(source)
        for words in [" ".join(text.split())]
        for pattern, instead in PHRASES.items()
        for match in re.finditer(pattern, words)
    ]
    assert found == []


def _docstrings(source: Source) -> Iterator[tuple[int, str]]:
    """Line and text of docstrings of modules, classes, functions and fields."""
    for node in source.nodes:
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))) if text.strip():
                    yield statement.lineno, text
