"""Entry of the `rayfleet` command. Each subcommand imports what it needs when it runs."""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import version

from cluster.cli.parser import CommandParser


def main(argv: list[str] | None = None) -> None:
    """Runs the command; exits with 2 and one line for what the user can put right."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    try:
        sys.exit(arguments.run(arguments))
    except ValueError as error:
        parser.exit(2, f"rayfleet: {error}\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser with all subcommands; `run` of its result takes it and returns an exit code."""
    parser: argparse.ArgumentParser = CommandParser(
        prog="rayfleet",
        description="Serve language models on a fleet of worker groups under Ray.",
    )
    parser.add_argument("--version", action="version", version=f"rayfleet {version('rayfleet')}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")

    from cluster.bench import cli as bench
    from cluster.cli import doctor, keys, serve

    serve.register(subparsers)
    bench.register(subparsers)
    doctor.register(subparsers)
    keys.register(subparsers)
    return parser


if __name__ == "__main__":
    main()
