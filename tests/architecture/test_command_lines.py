"""Command lines reject unknown flags, including abbreviations of known ones."""

from __future__ import annotations

import ast

from tests.support.sources import FLOORS, sources

PARSER = "cluster/cli/parser.py"
"""The file of CommandParser, which disables abbreviations and suggests flags."""


def test_no_parser_accepts_abbreviations() -> None:
    lenient = [
        f"{source.path}:{node.lineno}"
        for source in sources(*FLOORS, "deploy", "tests/campaigns", "tests/support")
        if "ArgumentParser" in source.text and source.path != PARSER  # few files to parse
        for node in source.nodes
        if isinstance(node, ast.Call)
        if ast.unparse(node.func).rpartition(".")[2] == "ArgumentParser"
        if "allow_abbrev=False" not in map(ast.unparse, node.keywords)
    ]
    assert lenient == [], "use cluster.cli.parser.CommandParser, or allow_abbrev=False"
