"""Entry of the `rayfleet` command. The module of a subcommand is imported when it is called."""

from __future__ import annotations

import argparse
import importlib
import sys
from functools import partial
from importlib.metadata import version

from cluster.cli.parser import CommandParser

COMMANDS = {
    "serve": ("cluster.cli.serve", "serve models behind an OpenAI endpoint"),
    "chat": ("cluster.cli.chat:add_chat_arguments", "chat with a model"),
    "complete": ("cluster.cli.chat:add_complete_arguments", "continue a text"),
    "top": ("cluster.cli.top", "models and workers of a fleet, live"),
    "bench": ("cluster.bench.cli", "measure an endpoint, the engine, or the gateway"),
    "doctor": ("cluster.cli.doctor", "check this machine and environment"),
    "keys": ("cluster.cli.keys", "make and check API keys"),
    "models": ("cluster.cli.models", "families of models, and what was checked of each"),
}
"""Subcommands: a module with the function that fills the parser (`add_arguments` unless named), and
a summary for --help."""


def main(argv: list[str] | None = None) -> None:
    """Runs the command and exits; with status 2 and one line for an error that users can mend."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    try:
        sys.exit(arguments.run(arguments))
    except ValueError as error:
        parser.exit(2, f"rayfleet: {error}\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser with all subcommands. `run` of the parsed namespace is the function that takes the
    namespace, runs the subcommand and returns the exit code."""
    parser: argparse.ArgumentParser = CommandParser(
        prog="rayfleet",
        description="Serve language models on a fleet of worker groups under Ray.",
    )
    parser.add_argument("--version", action="version", version=f"rayfleet {version('rayfleet')}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")

    for name, (module, summary) in COMMANDS.items():
        subparsers.add_parser(name, help=summary, fill=partial(_fill, module))
    return parser


def _fill(module: str, parser: CommandParser) -> None:
    name, _, function = module.partition(":")
    getattr(importlib.import_module(name), function or "add_arguments")(parser)


if __name__ == "__main__":
    main()
