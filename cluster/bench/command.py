"""Commands of benchmarks: parser, result on standard output, exit status, and child processes."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from cluster.bench.report import Result, describe_failures, emit, note
from cluster.launch import LaunchError

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]
Runner = Callable[[argparse.Namespace], Result]
AddCommand = Callable[[str, str, Runner], argparse.ArgumentParser]
"""Function that adds a command with a name, summary and runner, and returns its parser."""


def command_adder(subparsers: Subparsers) -> AddCommand:
    """Returns a function that adds benchmarks to `subparsers`. `args.run(args)` of the parsed
    arguments prints the result and returns the exit status, which is 1 if the result has `failed`
    or `broken` set."""

    def add(name: str, summary: str, runner: Runner) -> argparse.ArgumentParser:
        parser = subparsers.add_parser(name, help=summary, description=summary)
        parser.add_argument(
            "--json", action="store_true", help="print the result as one JSON object"
        )

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


def run_command(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> int:
    """Runs the benchmark of a command line; returns the exit status, 2 for a ValueError."""
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run_measurement(command: Sequence[str], name: str, timeout_s: float | None = None) -> Result:
    """Runs a benchmark's command in a child process; returns the JSON object on the last line of
    its output.

    Variants need different environments, which Ray reads only once per process.

    Raises:
        ValueError: the process failed, or took longer than `timeout_s`; the message contains
            `name`.
    """
    # In a new session, so that its child processes are killed after a timeout as well.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise ValueError(f"{name} timed out after {timeout_s:g} s") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if not output.strip():
        raise ValueError(f"{name} failed; see its error above")
    result: Result = json.loads(output.splitlines()[-1])
    return result


def reject_renamed(parser: argparse.ArgumentParser, old: str, new: str) -> None:
    """Makes a parser reject a renamed flag with an error that names the new flag."""

    class Rejection(argparse.Action):
        def __call__(self, *_: object) -> None:
            parser.error(f"{old} is now {new}")

    parser.add_argument(old, action=Rejection, default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def reject_command(parser: argparse.ArgumentParser, message: str) -> None:
    """Makes a command fail with `message` for any arguments."""

    def reject(*_: object) -> NoReturn:
        parser.error(message)

    parser.parse_known_args = reject  # type: ignore[method-assign, assignment]
