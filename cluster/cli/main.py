"""Entry point of `rayfleet`. The module of a subcommand is imported only when it is run."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from functools import partial
from importlib.metadata import version

from cluster.cli.parser import CommandParser

COMMANDS = {
    "serve": ("cluster.cli.serve", "start an OpenAI-compatible server"),
    "chat": ("cluster.cli.chat:add_chat_arguments", "chat with a model in the terminal"),
    "complete": ("cluster.cli.chat:add_complete_arguments", "complete a prompt"),
    "top": ("cluster.cli.top", "monitor models and workers live"),
    "bench": ("cluster.bench.cli", "benchmark an endpoint or the engine"),
    "doctor": ("cluster.cli.doctor", "check whether this machine and environment can serve"),
    "keys": ("cluster.cli.keys", "generate and check API keys"),
    "lora": ("cluster.cli.lora", "list, load and unload LoRA adapters of a running fleet"),
    "models": ("cluster.cli.models", "list supported model families and how they are tested"),
}
"""Subcommands: module with the function that adds the arguments (default: `add_arguments`), and
help text."""


def main(argv: list[str] | None = None) -> None:
    """Runs a command and exits; for user errors, prints the message and exits with status 2."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    try:
        code = arguments.run(arguments)
        sys.stdout.flush()
    except ValueError as error:
        parser.exit(2, f"rayfleet: {error}\n")
    except BrokenPipeError:
        # The reader of a pipe has ended, such as `head`. Nothing is left to flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)


def build_parser() -> argparse.ArgumentParser:
    """Parser with all subcommands. `run` of the parsed namespace is a function that takes the
    namespace, runs the subcommand and returns the exit code."""
    parser: argparse.ArgumentParser = CommandParser(
        prog="rayfleet",
        description="Serve large language models on a fleet of workers, on top of Ray Serve.",
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
