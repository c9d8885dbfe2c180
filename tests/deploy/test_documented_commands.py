"""Commands in the documents exist: subcommands, flags, modules, make targets and paths."""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
from collections.abc import Iterator
from functools import cache

import pytest

from cluster.bench.cli import _MOVED
from cluster.cli.main import build_parser
from cluster.cli.parser import CommandParser
from deploy.benchmarks.cli import add_commands
from tests.support.paths import ROOT
from tests.support.sources import FLOORS

DOCUMENTS = sorted(
    path
    for pattern in ("*.md", *(f"{folder}/**/*.md" for folder in (*FLOORS, "deploy", "helm")))
    for path in ROOT.glob(pattern)
)
PROGRAM = re.compile(r"(?:\.venv/bin/)?(rayfleet|make|python -m) (.+)")
MOVED = {f"rayfleet bench {name}" for name in _MOVED}
"""Commands that only name their replacement."""
PATH = re.compile(rf"(?:{'|'.join((*FLOORS, 'deploy', 'helm', 'tests'))})/[\w./-]+")


def test_commands_of_the_documents_exist() -> None:
    commands = [command for path in DOCUMENTS for command in commands_in(path.read_text())]
    assert len(commands) > 100
    found = {command: problem for command in commands if (problem := problem_of(command))}
    assert found == {}


@pytest.mark.parametrize(
    "command",
    [
        "rayfleet srve --port 1",
        "rayfleet serve --prot 1",
        "rayfleet bench srve --help",
        "rayfleet bench overlap",
        "python -m deploy.benchmarks rotuer --real",
        "python -m deploy.benchmarks router --reel",
        "python -m deploy.monitoring.built",
        "python -m pytest tests/router/test_plicies.py",
        "make check-unreal",
    ],
)
def test_a_wrong_command_is_found(command: str) -> None:
    assert problem_of(command)


def commands_in(text: str) -> Iterator[str]:
    """Commands after prompts in console blocks, and in code spans."""
    text = re.sub(r"\\\n\s*", " ", text)
    for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL):
        yield from (line[2:] for line in block.splitlines() if line.startswith("$ "))
    for span in re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        yield " ".join(span.split())


def problem_of(command: str) -> str:
    """What is wrong with a command; empty for one that exists, and for other programs."""
    match = PROGRAM.fullmatch(command)
    if match is None:
        return ""
    try:
        words = shlex.split(match[2], comments=True)
    except ValueError:  # continued on the next line
        words = match[2].split()
    missing = [word for word in words if PATH.fullmatch(word) and not (ROOT / word).exists()]
    if missing:
        return f"no file {missing[0]}"
    match match[1]:
        case "rayfleet":
            return problem_of_words(commands_of_rayfleet(), words)
        case "make":
            return "" if target_exists(words[0]) else f"no target {words[0]}"
    module, *rest = words
    if importlib.util.find_spec(module) is None:
        return f"no module {module}"
    return problem_of_words(benchmarks(), rest) if module == "deploy.benchmarks" else ""


def problem_of_words(parser: argparse.ArgumentParser, words: list[str]) -> str:
    """The first subcommand or flag that a parser does not have; placeholders are in capitals."""
    if isinstance(parser, CommandParser) and parser._fill is not None:
        fill, parser._fill = parser._fill, None
        fill(parser)
    flags = {flag for action in parser._actions for flag in action.option_strings}
    commands = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    for number, word in enumerate(words):
        if word.startswith("-"):
            if word.partition("=")[0] not in flags:
                return f"{parser.prog}: no flag {word}"
        elif commands and not word.isupper():
            known = commands[0].choices
            if word not in known or f"{parser.prog} {word}" in MOVED:
                return f"{parser.prog}: no command {word}"
            return problem_of_words(known[word], words[number + 1 :])
    return ""


@cache
def commands_of_rayfleet() -> argparse.ArgumentParser:
    return build_parser()


@cache
def benchmarks() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = CommandParser(prog="python -m deploy.benchmarks")
    add_commands(parser.add_subparsers())
    return parser


def target_exists(name: str) -> bool:
    """Whether the Makefile has a target; `check-*` and `check-NAME` stand for several."""
    makefile = (ROOT / "Makefile").read_text()
    pattern = re.escape(re.sub(r"\*|[A-Z]+", "X", name)).replace("X", r"[\w-]+")
    return re.search(rf"^{pattern}:", makefile, re.MULTILINE) is not None
