"""Code and docs avoid idioms that readers stop at; each has a plain alternative.

The words to use are those of vLLM's and Ray's docs. This is a ratchet: `MAX_PLACES` only goes down.
`pytest -rP tests/architecture/test_words.py` prints the current number and all places.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.sources import FLOORS

MAX_PLACES = 0
"""Maximum number of idioms in all files together; lower it when the number falls."""

_PEOPLE = ("client", "user", "caller", "person", "operator", "somebody", "anybody", "nobody", "who")


def _unless_people(verb: str) -> str:
    """Pattern of a verb whose subject is not a person."""
    return rf"\b{verb}\b" + "".join(rf"(?<!\b{person} {verb})" for person in _PEOPLE)


IDIOMS = {
    r"\b(?:data-centre|learnt|spilt|misspelt|modelling)\b": "data-center, learned, spilled (US)",
    r"\b(?:exact|equal) to the bit\b": "bit-exact, bitwise equal",
    r"\b(?:process|thread|environment) of (?:its|their) own\b": "a separate process",
    r"\b(?:told|tells|telling)\b": "given, reported, shows, names; is distinguished from",
    _unless_people("asks"): "requests, requires, queries, calls",
    _unless_people("wants"): "needs, requires, expects",
    r"\bhears? (?:of|from)\b": "receives, is notified",
    r"\btak(?:es?|en|ing) (?:it|them|\w+s) for\b": "treats as, assumes",
    r"\bof (?:its|their) own accord\b": "automatically",
    r"\bup to, not including\b": "[start, stop)",
    r"\ba factor of the result\b": "by which the result is multiplied",
    r"\bequal bits\b": "bitwise equal results",
    r"\bnone here\b": "unsupported, not available",
    r"\b(?:refuse[sd]?|rejected) by name\b": "rejected with an error that names it",
    r"\b(?:repair|mend) (?:it|the|them|its)\b": "fix, correct",
    r"\blet(?:s|ting)? (?:[\w']+ ){0,2}go\b": "releases, frees, drops",
    r"\b(?:goes|went) on(?! (?:the|an?|its|each|every|one|top|CPU|CUDA|GPUs?)\b)": "continues",
    r"\b(?:Most|Least|Fewest) (?!of\b|recent|common|used|likely|models\b|other)": (
        "Maximum, Minimum (as a bound); Most of"
    ),
    r"\bthe (?:most|least) (?:that|of|for which)\b": "the maximum, the minimum",
    r"\bleast (?:number|size|value|share|difference)\b": "minimum, smallest",
}
"""Pattern of an idiom, and what to say in its place."""

SUFFIXES = {".py", ".md", ".js", ".html", ".yaml", ".yml", ".tpl", ".h", ".cpp", ".sh"}
PROSE = ("values.schema.json", "NOTES.txt")
"""Files with prose that their suffixes do not show."""
DATA = (
    "deploy/models/tasks/",  # texts that the demo model is trained on
    "deploy/models/functions.py",
    "deploy/models/calling.py",
    "deploy/benchmarks/routing/paced.py",  # prose that paced workers answer with
    "tests/architecture/test_words.py",
)


def test_prose_has_no_untranslated_idioms() -> None:
    found = [
        f"{path}:{line}: {words!r}, say: {IDIOMS[pattern]}"
        for path, text in _texts()
        for line, words, pattern in idioms_in(text)
    ]
    report = "\n".join(
        [f"{len(found)} idioms, {MAX_PLACES} allowed; rewrite the new ones:", *found]
    )
    print(report)
    assert len(found) <= MAX_PLACES, report


def test_names_of_tests_have_no_idioms() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for name in re.findall(r"def (test_\w+)", path.read_text(encoding="utf-8"))
        if any(idioms_in(name.replace("_", " ")))
    ]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "the option tells which one",
        "A worker asks for",
        "unsupported fields are refused by name",
        "Most workers; 0 disables",
        "the error names the\n    # remedy, or is refused\n    # by name",
        "the response goes on after",
        "lets its pages go",
        "runs in a process of its own",
    ],
)
def test_an_idiom_is_found(text: str) -> None:
    assert list(idioms_in(text))


@pytest.mark.parametrize(
    "text",
    [
        "a client asks for JSON",
        "Most of the time",
        "at most 8 tokens, at least 1",
        "the least recently used page",
        "what goes on the wire",
        "parameters by name",
    ],
)
def test_plain_english_is_not(text: str) -> None:
    assert not list(idioms_in(text))


def idioms_in(text: str) -> Iterator[tuple[int, str, str]]:
    """Line, words and pattern of each idiom."""
    if not _any_idiom().search(text):  # a tenth of the time of all patterns in turn
        return
    for pattern in IDIOMS:
        for match in _compiled(pattern).finditer(text):
            yield text.count("\n", 0, match.start()) + 1, match.group(), pattern


@cache
def _any_idiom() -> re.Pattern[str]:
    return re.compile("|".join(_compiled(pattern).pattern for pattern in IDIOMS))


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """The pattern, with line breaks (and a comment's sign after them) allowed for spaces."""
    if "(?<!" in pattern:  # of fixed width
        return re.compile(pattern)
    return re.compile(pattern.replace(" ", r"\s+(?:[#*] )?"))


def _texts() -> Iterator[tuple[str, str]]:
    """Path and prose of each file: of Python, its comments and strings alone."""
    for path in _files():
        name = path.relative_to(ROOT).as_posix()
        if name.startswith(DATA):
            continue
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".py" and any(idioms_in(text)):  # parsed only then: it takes longer
            text = _prose(text)
        yield name, text


def _files() -> Iterator[Path]:
    yield from sorted(ROOT.glob("*.md"))
    yield from (ROOT / "Makefile", ROOT / "pyproject.toml")
    for folder in (*FLOORS, "deploy", "helm", "tests"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and (path.suffix in SUFFIXES or path.name in PROSE):
                yield path


def _prose(code: str) -> str:
    """Comments and strings of a module, in their lines; all else is empty."""
    kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)}
    lines = [""] * (code.count("\n") + 2)
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type in kinds:
            for offset, part in enumerate(token.string.split("\n")):
                lines[token.start[0] - 1 + offset] += part + " "
    return "\n".join(lines)
