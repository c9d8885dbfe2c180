"""Command-line flags of `rayfleet bench speculative`, and options from them."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.cli.options import add_options, given_options
from worker.engine.config import EngineConfig

if TYPE_CHECKING:
    from cluster.bench.speculative import SpeculativeOptions


def add_speculative_flags(parser: argparse.ArgumentParser) -> None:
    """The fields of SpeculativeOptions and of the engine."""
    parser.add_argument("--model", help="checkpoint folder; default: the demo model")
    parser.add_argument("--questions", help="JSON lines; default: the demo model's held-out ones")
    set_here = ("model", "max_num_seqs")
    add_options(parser.add_argument_group("engine"), EngineConfig, exclude=set_here)
    parser.add_argument("--running", default="1,4,16,32", help="requests at once (1,4,16,32)")
    parser.add_argument("--kinds", default="heldout,copy,random", help="of prompts (all three)")
    parser.add_argument("--pairs", type=int, default=10, help="turns per engine (default 10)")
    parser.add_argument(
        "--per-stream",
        type=int,
        default=4,
        help="requests of a turn per running one, at least 24 in all (default 4)",
    )


def speculative_options(args: argparse.Namespace) -> SpeculativeOptions:
    """Options from flags; `args.model` is set. Drafts by n-grams unless said otherwise."""
    from cluster.bench.speculative import SpeculativeOptions

    engine = EngineConfig(**given_options(args, EngineConfig))
    if "speculative_method" not in given_options(args, EngineConfig):
        engine = replace(engine, speculative_method="ngram")
    beside = Path(args.model).resolve().parent / "demo_heldout.jsonl"
    return SpeculativeOptions(
        engine=engine,
        questions=args.questions or str(beside),
        running=tuple(int(text) for text in args.running.split(",")),
        kinds=tuple(args.kinds.split(",")),
        pairs=args.pairs,
        per_stream=args.per_stream,
    )
