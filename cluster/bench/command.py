"""How a benchmark is a command: its parser, its result on standard output, its exit status."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from cluster.bench.report import Result, describe_failures, emit, note
from cluster.launch import LaunchError

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]
Runner = Callable[[argparse.Namespace], Result]
AddCommand = Callable[[str, str, Runner], argparse.ArgumentParser]
"""Makes a parser, to which flags are added, from a name, a summary and what runs the command."""


def command_adder(subparsers: Subparsers) -> AddCommand:
    """A function that adds benchmarks to `subparsers`; `args.run(args)` then returns the exit
    status."""

    def add(name: str, summary: str, runner: Runner) -> argparse.ArgumentParser:
        parser = subparsers.add_parser(name, help=summary, description=summary)
        parser.add_argument("--json", action="store_true", help="print one JSON object")

        def run(args: argparse.Namespace) -> int:
            try:
                result = runner(args)
            except LaunchError as error:
                print(error, file=sys.stderr)
                return 1
            emit(result, as_json=args.json, title=f"bench {name}")
            if result.get("errors"):
                note(describe_failures(result["errors"]))
            return 1 if result.get("failed") or result.get("broken") else 0

        parser.set_defaults(run=run)
        return parser

    return add


def refuse_renamed(parser: argparse.ArgumentParser, old: str, new: str) -> None:
    """Has a parser refuse a flag of before with the name that it has now."""

    class Refusal(argparse.Action):
        def __call__(self, *_: object) -> None:
            parser.error(f"{old} is now {new}")

    parser.add_argument(old, action=Refusal, default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def refuse_all(parser: argparse.ArgumentParser, message: str) -> None:
    """Has a command end with `message`, whatever flags it is given."""

    def refuse(*_: object) -> NoReturn:
        parser.error(message)

    parser.parse_known_args = refuse  # type: ignore[method-assign, assignment]
