"""Messages of errors and logs avoid phrases that leave out the cause or the remedy.

Each pattern was removed everywhere; the alternative says what is wrong, and what to do.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.support.sources import FLOORS, Source, sources

PHRASES = {
    r"\bmust give\b": "must set, must have",
    r"\bmust be that of\b": "must be NAME, must have the keys of",
    r"\bmathematics\b": "outputs",
    r"\bmissing in\b": "missing from",
    r"\bfor each of \{\} layers": "for each of the N layers",
    r", of (?:model_type|kind)\b": "which requires model_type",
    r"\b(?:is|are) not negative\b": "non-negative",
    r"\b(?:is|are) not supported, (?:only|use|merge|must|choose)\b": "is not supported: only ...",
    r": \{\}: (?:fix|add|remove|use)\b": "the cause in parentheses, then the remedy",
    r"\b(?:(?:normal|quant|initial)is(?=e|a|i)|neighbour|favour|colour|behaviour)": "US spelling",
    r"\bstart-up\b": "startup",
}
"""Pattern of a phrase, and what to say in its place; `{}` stands for a value in the message."""
_ANY = re.compile("|".join(PHRASES))


def test_messages_have_no_such_phrases() -> None:
    found = [
        f"{source.path}:{line}: {phrase!r}, say: {PHRASES[pattern]}"
        for source in sources(*FLOORS, "deploy")
        for line, text in messages(source)
        for pattern, phrase in phrases_in(text)
    ]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "{key} must give all layers the same size",
        "{key} is missing in config.json",
        "it must have a number for each of {} layers",
        "generation_config.json: {}: fix it",
        "{dtype} is not supported, only fp32",
    ],
)
def test_a_phrase_is_found(text: str) -> None:
    assert list(phrases_in(text))


@pytest.mark.parametrize(
    "text",
    [
        "{key} = {value} in config.json must be a positive integer: fix it",
        "--task {task} is not supported for {name}: use --task embed",
        "{name} must not be negative, got {value}",
    ],
)
def test_plain_messages_are_not(text: str) -> None:
    assert not list(phrases_in(text))


def phrases_in(text: str) -> Iterator[tuple[str, str]]:
    """Pattern and words of each phrase."""
    if not _ANY.search(text):
        return
    for pattern in PHRASES:
        for match in re.finditer(pattern, text):
            yield pattern, match.group()


def messages(source: Source) -> Iterator[tuple[int, str]]:
    """Line and text of each string in a call or assertion, with `{}` for values."""
    for node in source.nodes:
        match node:
            case ast.Call(args=args, keywords=keywords):
                parts = [*args, *(keyword.value for keyword in keywords)]
            case ast.Assert(msg=ast.expr() as message):
                parts = [message]
            case _:
                continue
        for part in parts:
            match part:
                case ast.Constant(value=str(text)):
                    yield part.lineno, text
                case ast.JoinedStr(values=values):
                    yield part.lineno, "".join(map(_text, values))


def _text(part: ast.expr) -> str:
    return str(part.value) if isinstance(part, ast.Constant) else "{}"
