"""The `bench` commands."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from cluster.bench.ab.commands import add_ab_commands
from cluster.bench.command import command_adder, refuse_renamed
from cluster.bench.flags import (
    add_dataset_flags,
    add_load_flags,
    add_versus_flags,
    dataset_options,
    serve_options,
)
from cluster.bench.gateway.options import VARIANTS, GatewayOptions
from cluster.bench.gateway.run import run_gateway
from cluster.bench.jobs.flags import add_job_commands
from cluster.bench.kernels.options import KernelOptions, RooflineOptions
from cluster.bench.kernels.shapes import SHAPES
from cluster.bench.report import Result
from cluster.bench.routing.flags import add_router_flags, run_router
from cluster.bench.scenarios.flags import add_scenarios_command
from cluster.bench.serve import run_serve
from cluster.bench.versus import VersusOptions, run_versus
from cluster.cli.options import add_options, given_options
from cluster.cli.parser import CommandParser
from cluster.config import find_demo_model
from worker.config import EngineConfig

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


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
    serve = add("serve", "load on any OpenAI endpoint", _serve)
    serve.add_argument("--base-url", default="http://127.0.0.1:8000")
    serve.add_argument("--save-detailed", action="store_true", help="with every request's times")
    add_load_flags(serve)
    versus = add("versus", "two endpoints under the same load, in turn", _versus)
    add_versus_flags(versus)
    add_load_flags(versus)
    _add_throughput_flags(add("throughput", "the engine offline, without HTTP", _throughput))
    add_ab_commands(add)
    add_options(add("kernels", "each op against the device's peak", _kernels), KernelOptions)
    _add_roofline_flags(add("roofline", "decode steps against the memory's bandwidth", _roofline))
    add_scenarios_command(add)
    _add_gateway_flags(add("gateway", "CPU time per token before the engine", _gateway))
    add_router_flags(
        add("router", "routing policies compared, or what a decision costs", run_router)
    )
    add_job_commands(add)


def _serve(args: argparse.Namespace) -> Result:
    return run_serve(serve_options(args))


def _throughput(args: argparse.Namespace) -> Result:
    # Imported here: it loads torch, which the load client can do without.
    from cluster.bench.throughput import ThroughputOptions, run_throughput

    engine = EngineConfig(**given_options(args, EngineConfig))
    return run_throughput(
        ThroughputOptions(
            engine=engine,
            tokenizer=args.tokenizer,
            dataset=dataset_options(args),
            num_prompts=args.num_prompts,
            num_warmups=args.num_warmups,
            temperature=args.temperature,
            detokenize=not args.disable_detokenize,
            seed=args.seed,
            rounds=args.rounds or (5 if args.batch_invariant_cost else 1),
            batch_invariant_cost=args.batch_invariant_cost,
        )
    )


def _kernels(args: argparse.Namespace) -> Result:
    from cluster.bench.kernels.run import run_kernels

    return run_kernels(KernelOptions(**given_options(args, KernelOptions)))


def _roofline(args: argparse.Namespace) -> Result:
    from cluster.bench.kernels.roofline import run_roofline

    return run_roofline(
        RooflineOptions(
            models=tuple(args.models),
            engine=EngineConfig(model="", **given_options(args, EngineConfig)),
            running=tuple(int(text) for text in args.running.split(",")),
            turns=args.turns,
            steps=args.steps,
            input_len=args.input_len,
        )
    )


def _gateway(args: argparse.Namespace) -> Result:
    return run_gateway(
        GatewayOptions(
            model=args.model or find_demo_model(),
            **{f.name: getattr(args, f.name) for f in fields(GatewayOptions) if f.name != "model"},
        )
    )


def _versus(args: argparse.Namespace) -> Result:
    args.base_url = args.a
    a = serve_options(args)
    b = replace(
        a,
        base_url=args.b,
        model=args.b_model or args.model,
        api_key=args.b_api_key or a.api_key,
    )
    return run_versus(
        VersusOptions(
            a=a,
            b=b,
            concurrencies=tuple(int(text) for text in args.concurrencies.split(",")),
            rounds=args.rounds,
            prompts_per_stream=args.prompts_per_stream,
            metric=args.metric,
            pause_s=args.pause_s,
        )
    )


def _add_throughput_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="checkpoint folder or Hub repository")
    add_options(parser.add_argument_group("engine"), EngineConfig, exclude=("model",))
    add_dataset_flags(parser.add_argument_group("prompts"))
    parser.add_argument("--tokenizer", help="folder; default: the model's own")
    parser.add_argument("--num-warmups", type=int, default=8, help="requests before (default 8)")
    parser.add_argument("--temperature", type=float, default=0.0, help="default 0: greedy")
    parser.add_argument("--disable-detokenize", action="store_true", help="leave out texts")
    parser.add_argument("--rounds", type=int, help="repetitions; the median is reported")
    parser.add_argument(
        "--batch-invariant-cost",
        action="store_true",
        help="alternate that mode with the normal one (5 rounds or more) and report the ratio",
    )


def _add_roofline_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--models",
        nargs="+",
        default=list(SHAPES),
        help=f"{', '.join(SHAPES)} (default: all), or folders with a config.json",
    )
    set_here = ("model", "overlap_depth", "max_num_seqs", "load_format")
    add_options(parser.add_argument_group("engine"), EngineConfig, exclude=set_here)
    parser.add_argument("--running", default="1,32,128", help="requests at once (default 1,32,128)")
    parser.add_argument("--turns", type=int, default=3, help="measurements (default 3)")
    parser.add_argument("--steps", type=int, default=64, help="steps per turn (default 64)")
    parser.add_argument("--input-len", type=int, default=512, help="prompt tokens (default 512)")


def _add_gateway_flags(parser: argparse.ArgumentParser) -> None:
    defaults = {f.name: f.default for f in fields(GatewayOptions)}
    parser.add_argument("--model", help="folder with a tokenizer; default: the demo model")
    parser.add_argument(
        "--streams",
        type=_numbers,
        default=defaults["streams"],
        help="requests at once, one measurement for each number (default 1,8,32)",
    )
    for name, text in (
        ("step_ms", "pace of a token, in milliseconds"),
        ("input_len", "tokens per prompt"),
        ("output_len", "tokens per completion"),
        ("requests_per_stream", "requests after each other"),
        ("rounds", "measurements; the median is reported"),
    ):
        default = defaults[name]
        flag = "--" + name.replace("_", "-")
        parser.add_argument(
            flag, type=type(default), default=default, help=f"{text} (default {default})"
        )
    parser.add_argument(
        "--baseline",
        nargs="?",
        const="two-hop",
        choices=VARIANTS,
        help="alternate with serve-items (no socket between worker and gateway), or with two-hop "
        "(default), a plain Serve app on Ray's default settings",
    )
    refuse_renamed(parser, "--arm", "--variant")
    parser.add_argument(
        "--variant", choices=VARIANTS, default=VARIANTS[0], help="what to measure alone"
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))
