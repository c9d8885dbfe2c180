"""Commands of `python -m deploy.benchmarks`: benchmarks of rayfleet's components.

Modules that import torch are imported only when their benchmark runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cluster.bench.command import command_adder, run_command
from cluster.bench.report import Result
from cluster.cli.options import add_option_groups, add_options, given_options
from cluster.cli.parser import CommandParser
from cluster.config import find_demo_model
from deploy.benchmarks.ab.commands import add_ab_commands
from deploy.benchmarks.kernels.options import KernelOptions, RooflineOptions
from deploy.benchmarks.lora_options import LoraOptions
from deploy.benchmarks.routing.flags import add_router_flags, run_router
from deploy.benchmarks.scenarios.flags import add_scenarios_command
from worker.config import EngineConfig

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one benchmark; returns the exit status."""
    parser: argparse.ArgumentParser = CommandParser(
        prog="python -m deploy.benchmarks",
        description="Benchmarks of rayfleet's components. For endpoints, use `rayfleet bench`.",
    )
    add_commands(parser.add_subparsers(dest="bench", required=True, metavar="COMMAND"))
    return run_command(parser, argv)


def add_commands(commands: Subparsers) -> None:
    """Adds the benchmarks to a parser's commands."""
    add = command_adder(commands)
    add_ab_commands(add)
    add_options(add("kernels", "each op relative to the device's peak", _kernels), KernelOptions)
    _add_roofline_flags(add("roofline", "decode steps relative to memory bandwidth", _roofline))
    _add_lora_flags(add("lora", "CPU time of steps with LoRA relative to a server without", _lora))
    add_scenarios_command(add)
    summary = "compare routing policies, or measure the cost of a decision"
    add_router_flags(add("router", summary, run_router))


def _kernels(args: argparse.Namespace) -> Result:
    from deploy.benchmarks.kernels.run import run_kernels

    return run_kernels(KernelOptions(**given_options(args, KernelOptions)))


def _add_roofline_flags(parser: argparse.ArgumentParser) -> None:
    set_here = ("model", "overlap_depth", "max_num_seqs", "load_format")
    add_option_groups(parser, "engine", EngineConfig, exclude=set_here)
    add_options(parser, RooflineOptions)


def _roofline(args: argparse.Namespace) -> Result:
    from deploy.benchmarks.kernels.roofline import run_roofline

    given = given_options(args, RooflineOptions)
    engine = EngineConfig.of(model="", **given_options(args, EngineConfig))
    return run_roofline(RooflineOptions(**given, engine=engine))


def _add_lora_flags(parser: argparse.ArgumentParser) -> None:
    set_here = ("device", "cpu_threads", "max_num_seqs", "kv_cache_tokens")
    adapters = ("enable_lora", "lora_modules", "max_loras", "max_cpu_loras")
    add_option_groups(parser, "engine", EngineConfig, exclude=("model", *set_here, *adapters))
    parser.add_argument("--model", help="checkpoint folder; default: the demo model")
    add_options(parser, LoraOptions)


def _lora(args: argparse.Namespace) -> Result:
    from deploy.benchmarks.lora import run_lora

    given = {"max_loras": 1, **given_options(args, EngineConfig), "enable_lora": True}
    engine = EngineConfig.of(**{**given, "model": args.model or find_demo_model()})
    return run_lora(LoraOptions(**given_options(args, LoraOptions), engine=engine))
