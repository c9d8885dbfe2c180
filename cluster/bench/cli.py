"""Commands of `rayfleet bench`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from cluster.bench.ab.commands import add_ab_commands
from cluster.bench.command import AddCommand, command_adder, refuse_all
from cluster.bench.datasets import DatasetOptions
from cluster.bench.flags import add_load_flags, dataset_options, serve_options
from cluster.bench.jobs.flags import add_job_commands
from cluster.bench.kernels.options import KernelOptions, RooflineOptions
from cluster.bench.report import Result
from cluster.bench.scenarios.flags import add_scenarios_command
from cluster.bench.serve import run_serve
from cluster.bench.throughput import ThroughputOptions, run_throughput
from cluster.cli.options import add_options, given_options
from cluster.cli.parser import CommandParser
from worker.config import EngineConfig

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_ROUTING = "cluster.bench.routing"
_MOVED = {
    "chaos": "`make check-chaos`, in a checkout",
    "fleet": "`make check-scale`, in a checkout",
    "gateway": "`make check-gateway`, in a checkout",
    "versus": "`bench compare URL_A URL_B`; its ratios are B over A",
}
"""Replacements of removed commands, by the command's name."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Fills the parser of `rayfleet bench`; `args.run(args)` returns the exit status."""
    parser.description = __doc__
    add_commands(parser.add_subparsers(dest="bench", required=True, metavar="COMMAND"))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one benchmark; the entry of `python -m cluster.bench`."""
    parser: argparse.ArgumentParser = CommandParser(prog="python -m cluster.bench")
    add_commands(parser.add_subparsers(dest="bench", required=True, metavar="COMMAND"))
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def add_commands(commands: Subparsers) -> None:
    """Adds the benchmarks to a parser's commands."""
    add = command_adder(commands)
    add_load_flags(add("serve", "load on any OpenAI endpoint", _serve))
    _add_throughput_flags(add("throughput", "the engine offline, without HTTP", _throughput))
    add_ab_commands(add)
    add_options(add("kernels", "each op against the device's peak", _kernels), KernelOptions)
    _add_roofline_flags(add("roofline", "decode steps against the memory's bandwidth", _roofline))
    add_scenarios_command(add)
    _add_router(add)
    add_job_commands(add)
    for name, now in _MOVED.items():
        refuse_all(commands.add_parser(name), f"bench {name} is now {now}")


def _serve(args: argparse.Namespace) -> Result:
    return run_serve(serve_options(args))


def _add_throughput_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="checkpoint folder or Hub repository")
    add_options(parser.add_argument_group("engine"), EngineConfig, exclude=("model", "tokenizer"))
    add_options(parser.add_argument_group("prompts"), DatasetOptions)
    add_options(parser, ThroughputOptions)


def _throughput(args: argparse.Namespace) -> Result:
    given = given_options(args, ThroughputOptions)
    engine = EngineConfig(**given_options(args, EngineConfig))
    return run_throughput(ThroughputOptions(**given, engine=engine, dataset=dataset_options(args)))


def _kernels(args: argparse.Namespace) -> Result:
    from cluster.bench.kernels.run import run_kernels

    return run_kernels(KernelOptions(**given_options(args, KernelOptions)))


def _add_roofline_flags(parser: argparse.ArgumentParser) -> None:
    set_here = ("model", "overlap_depth", "max_num_seqs", "load_format")
    add_options(parser.add_argument_group("engine"), EngineConfig, exclude=set_here)
    add_options(parser, RooflineOptions)


def _roofline(args: argparse.Namespace) -> Result:
    from cluster.bench.kernels.roofline import run_roofline

    given = given_options(args, RooflineOptions)
    engine = EngineConfig(model="", **given_options(args, EngineConfig))
    return run_roofline(RooflineOptions(**given, engine=engine))


def _add_router(add: AddCommand) -> None:
    """Adds `bench router`, which a checkout has and the wheel has not: it is refused there."""
    summary = "routing policies compared, or what a decision costs"
    if find_spec(_ROUTING) is None:
        refuse_all(
            add("router", f"{summary}; in a checkout", _serve),
            "the simulator of routing is no part of the installed package: clone rayfleet's "
            "repository, `pip install -e .` there, and run `rayfleet bench router` again",
        )
        return
    from cluster.bench.routing.flags import add_router_flags, run_router

    add_router_flags(add("router", summary, run_router))
