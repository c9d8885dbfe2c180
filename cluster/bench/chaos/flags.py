"""Command-line flags of `rayfleet bench chaos`."""

from __future__ import annotations

import argparse
import sys
from contextlib import redirect_stdout

from cluster.bench.chaos.options import ChaosOptions
from cluster.bench.command import AddCommand
from cluster.bench.report import Result
from cluster.cli.options import add_options, given_options


def add_chaos_command(add: AddCommand) -> None:
    """Adds `chaos` to the bench commands."""
    parser = add("chaos", "processes are killed and stopped under load", _run)
    add_options(parser, ChaosOptions)


def _run(args: argparse.Namespace) -> Result:
    from cluster.bench.chaos.cancels import run_cancels
    from cluster.bench.chaos.run import run_faults
    from cluster.bench.chaos.soak import run_soak

    options = ChaosOptions(**given_options(args, ChaosOptions))
    run = run_cancels if options.cancels else run_soak if options.soak_s else run_faults
    # Ray tells the standard output of processes that have died, where results go.
    with redirect_stdout(sys.stderr):
        return run(options)
