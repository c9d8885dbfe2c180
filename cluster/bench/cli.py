"""The `bench` commands."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from cluster.bench.chaos.flags import add_chaos_command
from cluster.bench.fdfo_flags import add_fdfo_flags, fdfo_options
from cluster.bench.flags import (
    add_dataset_flags,
    add_load_flags,
    add_versus_flags,
    dataset_options,
    serve_options,
)
from cluster.bench.fleet.flags import add_fleet_command
from cluster.bench.gateway import run_gateway
from cluster.bench.gateway_options import ARMS, GatewayOptions
from cluster.bench.jobs.flags import add_job_commands
from cluster.bench.kernel_options import KernelOptions
from cluster.bench.metrics import tell_failures
from cluster.bench.model_shapes import SHAPES
from cluster.bench.report import Result, emit, note
from cluster.bench.roofline_options import RooflineOptions
from cluster.bench.routing.flags import add_router_flags, run_router
from cluster.bench.scenarios.flags import add_scenarios_command
from cluster.bench.serve import run_serve
from cluster.bench.speculative_flags import add_speculative_flags, speculative_options
from cluster.bench.versus import VersusOptions, run_versus
from cluster.cli.options import add_options, given_options
from cluster.cli.parser import CommandParser
from cluster.config import find_demo_model
from cluster.launch import LaunchError
from worker.config import EngineConfig

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]
    Runner = Callable[[argparse.Namespace], Result]


def register(subparsers: Subparsers) -> None:
    """Adds `bench` with its own commands; `args.run(args)` returns the exit status."""
    parser = subparsers.add_parser(
        "bench", help="measure an endpoint, the engine, or the gateway", description=__doc__
    )
    add_commands(parser.add_subparsers(dest="bench", required=True, metavar="COMMAND"))


def add_commands(commands: Subparsers) -> None:
    """Adds each benchmark as a command of its own."""
    serve = _command(commands, "serve", "load on any OpenAI endpoint", _serve)
    serve.add_argument("--base-url", default="http://127.0.0.1:8000")
    serve.add_argument("--save-detailed", action="store_true", help="with every request's times")
    add_load_flags(serve)
    versus = _command(commands, "versus", "two endpoints under the same load, in turn", _versus)
    add_versus_flags(versus)
    add_load_flags(versus)
    throughput = _command(commands, "throughput", "the engine offline, without HTTP", _throughput)
    _add_throughput_flags(throughput)
    overlap = _command(commands, "overlap", "steps at overlap depth 0 and 1, in turn", _overlap)
    _add_overlap_flags(overlap)
    fdfo = _command(commands, "fdfo", "block diffusion: first done, first out", _fdfo)
    add_fdfo_flags(fdfo)
    kernels = _command(commands, "kernels", "each op against the device's peak", _kernels)
    add_options(kernels, KernelOptions)
    roofline = _command(
        commands, "roofline", "decode steps against the memory's bandwidth", _roofline
    )
    _add_roofline_flags(roofline)
    structured = _command(
        commands, "structured", "constrained requests against free ones, in turn", _structured
    )
    _add_structured_flags(structured)
    admission = _command(commands, "admission", "fifo against pack, in turn", _admission)
    _add_admission_flags(admission)
    speculative = _command(
        commands, "speculative", "tokens per second with drafts and without, in turn", _speculative
    )
    add_speculative_flags(speculative)
    add_scenarios_command(commands, _command)
    gateway = _command(commands, "gateway", "CPU time per token before the engine", _gateway)
    _add_gateway_flags(gateway)
    router = _command(
        commands, "router", "routing policies compared, or what a decision costs", run_router
    )
    add_router_flags(router)
    add_fleet_command(commands, _command)
    add_chaos_command(commands, _command)
    add_job_commands(commands, _command)


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


def _command(
    commands: Subparsers, name: str, summary: str, runner: Runner
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=summary, description=summary)
    parser.add_argument("--json", action="store_true", help="print one JSON object")

    def run(args: argparse.Namespace) -> int:
        try:
            result = runner(args)
        except LaunchError as error:
            print(error, file=sys.stderr)
            return 1
        emit(result, as_json=args.json, title=f"bench {name}")
        if result.get("errors"):
            note(tell_failures(result["errors"]))
        return 1 if result.get("failed") or result.get("broken") else 0

    parser.set_defaults(run=run)
    return parser


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


def _overlap(args: argparse.Namespace) -> Result:
    from cluster.bench.overlap import OverlapOptions, run_overlap

    args.model = args.model or find_demo_model()
    return run_overlap(
        OverlapOptions(
            engine=EngineConfig(**given_options(args, EngineConfig)),
            running=tuple(int(text) for text in args.running.split(",")),
            pairs=args.pairs,
            steps=args.steps,
            input_len=args.input_len,
            plot=args.plot,
        )
    )


def _fdfo(args: argparse.Namespace) -> Result:
    from cluster.bench.fdfo import run_fdfo

    return run_fdfo(fdfo_options(args))


def _kernels(args: argparse.Namespace) -> Result:
    from cluster.bench.kernels import run_kernels

    return run_kernels(KernelOptions(**given_options(args, KernelOptions)))


def _roofline(args: argparse.Namespace) -> Result:
    from cluster.bench.roofline import run_roofline

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


def _structured(args: argparse.Namespace) -> Result:
    from cluster.bench.structured import StructuredOptions, run_structured

    args.model = args.model or find_demo_model()
    return run_structured(
        StructuredOptions(
            engine=EngineConfig(**given_options(args, EngineConfig)),
            **{name: getattr(args, name) for name in _STRUCTURED_FLAGS},
        )
    )


def _admission(args: argparse.Namespace) -> Result:
    from cluster.bench.admission import AdmissionBenchOptions, run_admission

    args.model = args.model or find_demo_model()
    return run_admission(
        AdmissionBenchOptions(
            engine=EngineConfig(**given_options(args, EngineConfig)),
            **{name: getattr(args, name) for name in _ADMISSION_FLAGS},
        )
    )


def _speculative(args: argparse.Namespace) -> Result:
    from cluster.bench.speculative import run_speculative

    args.model = args.model or find_demo_model()
    return run_speculative(speculative_options(args))


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


def _add_overlap_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="checkpoint folder; default: the demo model")
    # The benchmark sets the other two itself.
    set_here = ("model", "overlap_depth", "max_num_seqs")
    add_options(parser.add_argument_group("engine"), EngineConfig, exclude=set_here)
    parser.add_argument("--running", default="1,8,32", help="requests at once (default 1,8,32)")
    parser.add_argument("--pairs", type=int, default=10, help="turns per depth (default 10)")
    parser.add_argument("--steps", type=int, default=100, help="steps per turn (default 100)")
    parser.add_argument("--input-len", type=int, default=16, help="prompt tokens (default 16)")
    parser.add_argument("--plot", metavar="FILE.png", help="draw both timelines")


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


_STRUCTURED_FLAGS = {
    "streams": (16, "requests at once"),
    "pairs": (10, "turns per arm"),
    "max_tokens": (128, "most tokens per request"),
    "input_len": (32, "prompt tokens"),
}


def _add_structured_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="checkpoint folder; default: the demo model")
    set_here = ("model", "max_num_seqs")
    add_options(parser.add_argument_group("engine"), EngineConfig, exclude=set_here)
    for name, (default, text) in _STRUCTURED_FLAGS.items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=int, default=default, help=f"{text} (default {default})")


_ADMISSION_FLAGS = {
    "pairs": (5, "turns per policy and setting"),
    "num_prompts": (128, "requests, all at once"),
    "base_len": (1, "tokens of a short prompt; long ones have 512 times as many"),
    "output_len": (32, "tokens per completion"),
    "budget": (256, "prompt tokens of a step"),
    "force_fifo_every": (8, "pack: every so many rounds are fifo"),
    "seed": (0, "of the prompts"),
}


def _add_admission_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="checkpoint folder; default: the demo model")
    set_here = {f.name for f in fields(EngineConfig) if f.name.startswith("prefill_")}
    set_here |= {"model", "max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill"}
    set_here |= {"max_queued_requests", "enable_prefix_caching"}
    add_options(parser.add_argument_group("engine"), EngineConfig, exclude=set_here)
    for name, (default, text) in _ADMISSION_FLAGS.items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=int, default=default, help=f"{text} (default {default})")


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
        choices=ARMS,
        help="alternate with serve-items (no socket between worker and gateway), or with two-hop "
        "(default), a plain Serve app on Ray's default settings",
    )
    parser.add_argument("--arm", choices=ARMS, default=ARMS[0], help="what to measure alone")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))
