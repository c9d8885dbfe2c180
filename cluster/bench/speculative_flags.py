"""Command-line flags of `rayfleet bench speculative`, and options from them."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.cli.options import add_options, given_options
from worker.config import EngineConfig

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
        help="least requests of a turn, per running one (default 4)",
    )
    parser.add_argument(
        "--turn-seconds",
        type=float,
        default=0.8,
        help="of a turn without drafts, about; twice that with one request at a time (default 0.8)",
    )


def speculative_options(args: argparse.Namespace) -> SpeculativeOptions:
    """Options from flags; `args.model` is set.

    Unless a method is given each kind of prompts has the one that suits it: held-out ones the draft
    model in the folder beside the model's, named as it is with "-draft", if there is one, others
    n-grams.
    """
    from cluster.bench.speculative import SpeculativeOptions

    engine = EngineConfig(**given_options(args, EngineConfig))
    model = Path(args.model).resolve()
    draft_model = model.with_name(f"{model.name}-draft")
    is_given = "speculative_method" in given_options(args, EngineConfig)
    if not is_given:
        engine = replace(engine, speculative_method="ngram")
    beside = model.with_name("demo_heldout.jsonl")
    return SpeculativeOptions(
        engine=engine,
        questions=args.questions or str(beside),
        running=tuple(int(text) for text in args.running.split(",")),
        kinds=tuple(args.kinds.split(",")),
        pairs=args.pairs,
        draft_model=str(draft_model) if draft_model.is_dir() and not is_given else "",
        per_stream=args.per_stream,
        turn_s=args.turn_seconds,
    )
