"""Commands of `rayfleet bench`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cluster.bench.agents.run import AgentOptions, run_agents
from cluster.bench.command import command_adder, reject_command, run_command
from cluster.bench.datasets import DatasetOptions
from cluster.bench.flags import add_load_flags, dataset_options, serve_options
from cluster.bench.jobs.flags import add_job_commands
from cluster.bench.report import Result
from cluster.bench.serve import run_serve
from cluster.bench.throughput import ThroughputOptions, run_throughput
from cluster.cli.options import add_option_groups, add_options, given_options
from cluster.cli.parser import CommandParser
from worker.config import EngineConfig

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_IN_CHECKOUT = "overlap admission structured speculative fdfo kernels roofline scenarios router"
_MOVED = {
    "chaos": "`make check-chaos`, in a checkout",
    "fleet": "`make check-scale`, in a checkout",
    "gateway": "`make check-gateway`, in a checkout",
    "versus": "`bench compare URL_A URL_B`, whose ratios are B over A",
    **{
        name: f"`python -m deploy.benchmarks {name}`, in a checkout"
        for name in _IN_CHECKOUT.split()
    },
}
"""Replacements for removed commands, by the command's name."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `rayfleet bench` to its parser; `args.run(args)` returns the exit
    status."""
    parser.description = "Benchmarks an endpoint or the engine."
    add_commands(parser.add_subparsers(dest="bench", required=True, metavar="COMMAND"))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one benchmark; entry point of `python -m cluster.bench`."""
    parser: argparse.ArgumentParser = CommandParser(prog="python -m cluster.bench")
    add_commands(parser.add_subparsers(dest="bench", required=True, metavar="COMMAND"))
    return run_command(parser, argv)


def add_commands(commands: Subparsers) -> None:
    """Adds all benchmarks to a parser's commands."""
    add = command_adder(commands)
    add_load_flags(
        add("serve", "benchmark the online serving of any OpenAI-compatible endpoint", _serve)
    )
    _add_throughput_flags(
        add("throughput", "benchmark the offline throughput of the engine", _throughput)
    )
    _add_agent_flags(add("agents", "benchmark coding-agent sessions in closed loops", _agents))
    add_job_commands(add)
    for name, now in _MOVED.items():
        reject_command(commands.add_parser(name), f"bench {name} is now {now}")


def _serve(args: argparse.Namespace) -> Result:
    return run_serve(serve_options(args))


def _add_agent_flags(parser: argparse.ArgumentParser) -> None:
    add_options(parser, AgentOptions)


def _agents(args: argparse.Namespace) -> Result:
    given = given_options(args, AgentOptions)
    given["api_key"] = given.get("api_key") or os.environ.get("OPENAI_API_KEY")
    return run_agents(AgentOptions(**given))


def _add_throughput_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="folder of a checkpoint, or Hub repository")
    add_option_groups(parser, "engine", EngineConfig, exclude=("model", "tokenizer"))
    add_options(parser.add_argument_group("prompts"), DatasetOptions)
    add_options(parser, ThroughputOptions)


def _throughput(args: argparse.Namespace) -> Result:
    given = given_options(args, ThroughputOptions)
    engine = EngineConfig.of(**given_options(args, EngineConfig))
    return run_throughput(ThroughputOptions(**given, engine=engine, dataset=dataset_options(args)))
