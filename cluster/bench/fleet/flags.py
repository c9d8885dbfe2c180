"""Command-line flags of `rayfleet bench fleet`."""

from __future__ import annotations

import argparse

from cluster.bench.command import AddCommand
from cluster.bench.fleet.options import FleetOptions
from cluster.bench.report import Result
from cluster.cli.options import add_options, given_options


def add_fleet_command(add: AddCommand) -> None:
    """Adds `fleet` to the bench commands."""
    parser = add("fleet", "routing before thousands of simulated workers", _run)
    add_options(parser, FleetOptions)


def _run(args: argparse.Namespace) -> Result:
    from cluster.bench.fleet.run import run_fleet

    return run_fleet(FleetOptions(**given_options(args, FleetOptions)))
