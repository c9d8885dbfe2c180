"""Command-line flags of `rayfleet bench fdfo`, and options from them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from cluster.bench.model_shapes import BLOCK_SHAPES
from cluster.cli.options import add_options, given_options
from worker.config import EngineConfig

if TYPE_CHECKING:
    from cluster.bench.fdfo_options import FdfoOptions


def add_fdfo_flags(parser: argparse.ArgumentParser) -> None:
    """The fields of FdfoOptions and of the engine."""
    parser.add_argument(
        "--model",
        required=True,
        help=f"folder of a block-diffusion checkpoint; for a replay also {', '.join(BLOCK_SHAPES)}",
    )
    set_here = ("model", "max_num_seqs", "dllm_fdfo", "dllm_disable", "enable_prefix_caching")
    add_options(parser.add_argument_group("engine"), EngineConfig, exclude=set_here)
    parser.add_argument(
        "--questions", help="JSON lines; default: MODEL_heldout.jsonl, demo's of a model demo-x"
    )
    parser.add_argument("--num-questions", type=int, default=0, help="default: all")
    parser.add_argument("--repeats", type=int, default=2, help="of the questions (default 2)")
    parser.add_argument("--running", default="4,16", help="requests at once (default 4,16)")
    parser.add_argument("--pairs", type=int, default=10, help="turns per arm (default 10)")
    parser.add_argument("--max-tokens", type=int, default=128, help="per answer (default 128)")
    parser.add_argument(
        "--kinds", default="questions,long", help="workloads (default questions,long)"
    )
    parser.add_argument(
        "--long-prompt-blocks", type=int, default=20, help="of the longest prompt (default 20)"
    )
    parser.add_argument("--num-long", type=int, default=32, help="long prompts (default 32)")
    parser.add_argument(
        "--replay-rounds",
        default="",
        metavar="ROUNDS:BLOCKS,...",
        help="instead of questions, blocks that take so many rounds, whatever the weights"
        " (random ones: --load-format dummy)",
    )
    parser.add_argument(
        "--shares", action="store_true", help="what each refinement brings beside all others, too"
    )


def fdfo_options(args: argparse.Namespace) -> FdfoOptions:
    """Options from flags."""
    from cluster.bench.fdfo_options import FdfoOptions
    from cluster.bench.fdfo_replay import parse_replay

    return FdfoOptions(
        engine=EngineConfig(**given_options(args, EngineConfig)),
        questions=args.questions,
        num_questions=args.num_questions,
        repeats=args.repeats,
        running=tuple(int(text) for text in args.running.split(",")),
        pairs=args.pairs,
        max_tokens=args.max_tokens,
        long_prompt_blocks=args.long_prompt_blocks,
        num_long=args.num_long,
        shares=args.shares,
        kinds=tuple(args.kinds.split(",")),
        replay=parse_replay(args.replay_rounds),
    )
