"""Command-line flags of `rayfleet bench fleet`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from cluster.bench.fleet.options import FleetOptions
from cluster.bench.report import Result
from cluster.cli.options import add_options, given_options

Command = Callable[[Any, str, str, Callable[[argparse.Namespace], Result]], argparse.ArgumentParser]


def add_fleet_command(commands: Any, command: Command) -> None:
    """Adds `fleet` to the bench commands; `command` makes a parser that reports results."""
    parser = command(commands, "fleet", "routing before thousands of simulated workers", _run)
    add_options(parser, FleetOptions)


def _run(args: argparse.Namespace) -> Result:
    from cluster.bench.fleet.run import run_fleet

    return run_fleet(FleetOptions(**given_options(args, FleetOptions)))
