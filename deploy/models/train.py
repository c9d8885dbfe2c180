"""Train a demo model from nothing: ``python -m deploy.models.train --output deploy/models/demo``.

``--start deploy/models/demo`` goes on with such a model, in the second phase, which teaches it to
call functions, or with ``--polish`` in the third, which teaches it to sort any words and to say
what it can do where it cannot answer. ``--teacher`` trains the small model that drafts for it.

With ``--kind diffusion`` it is the block-diffusion one, ``demo-diffusion``.

Generates the corpus, trains the tokenizer and the model, and writes the checkpoint and, beside it,
the held-out questions. Two CPU cores need less than an hour.
"""

from __future__ import annotations

import argparse
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Final

from cluster.cli.parser import CommandParser
from deploy.models.diffusion_training import DiffusionTraining
from deploy.models.training import CausalTraining, DraftTraining, ToolTraining, TrainingConfig

_NICENESS: Final = 5
_DIFFUSION_MAX_LENGTH: Final = 512
_DIFFUSION_BATCH_TOKENS: Final = 2048
_DRAFT_MAX_LENGTH: Final = 768
_TOOLS_MAX_LENGTH: Final = 1024
_TOOLS_BATCH_TOKENS: Final = 3072
_TOOLS_MATRIX_LR: Final = 3e-3
_TOOLS_OTHER_LR: Final = 2e-3
_POLISHING_LR: Final = 0.5
"""Factor of the rates in the third phase, whose model knows nearly all of it."""
_TOOLS_WARMUP_STEPS: Final = 20
_TOOLS_DECAY_FROM: Final = 0.7
_TOOLS_SAVE_EVERY: Final = 20


def main() -> None:
    """Parse the command line and run the training."""
    args = _parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    os.nice(_NICENESS)
    config = TrainingConfig(
        seed=args.seed,
        num_steps=args.num_steps,
        num_threads=args.num_threads,
        start=args.start,
        teacher=args.teacher,
        is_polishing=args.polish,
    )
    if args.kind == "diffusion":
        # Noisy copies make rows longer, and attention is computed with a mask.
        config = replace(
            config, max_length=_DIFFUSION_MAX_LENGTH, batch_tokens=_DIFFUSION_BATCH_TOKENS
        )
        DiffusionTraining(config, args.output, args.state).run()
    elif args.teacher is not None:
        # A third of the time would go into rows longer than nearly all that is ever asked.
        config = replace(config, max_length=_DRAFT_MAX_LENGTH)
        DraftTraining(config, args.output, args.state).run()
    elif args.start is not None:
        # Weights that know most of it need smaller steps; the updates cost a third of short ones.
        config = replace(
            config,
            max_length=_TOOLS_MAX_LENGTH,
            batch_tokens=_TOOLS_BATCH_TOKENS,
            matrix_lr=_TOOLS_MATRIX_LR * (_POLISHING_LR if args.polish else 1.0),
            other_lr=_TOOLS_OTHER_LR * (_POLISHING_LR if args.polish else 1.0),
            warmup_steps=_TOOLS_WARMUP_STEPS,
            decay_from=_TOOLS_DECAY_FROM,
            save_every=_TOOLS_SAVE_EVERY,
            log_every=_TOOLS_SAVE_EVERY,
        )
        ToolTraining(config, args.output, args.state).run()
    else:
        CausalTraining(config, args.output, args.state).run()


def _parse_args() -> argparse.Namespace:
    parser = CommandParser(description=__doc__, prog="python -m deploy.models.train")
    parser.add_argument("--output", type=Path, required=True, help="directory of the checkpoint")
    parser.add_argument(
        "--teacher", type=Path, help="trained model to distil into a small one that drafts for it"
    )
    parser.add_argument(
        "--start",
        type=Path,
        help="trained model to go on with: it learns to call functions, or a draft its teacher",
    )
    parser.add_argument("--kind", choices=("causal", "diffusion"), default="causal")
    parser.add_argument("--state", type=Path, help="file that lets a run cut short go on")
    parser.add_argument(
        "--polish",
        action="store_true",
        help="third phase, with --start: any words to sort, and messages from outside its world",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-steps", type=int, default=4000)
    parser.add_argument("--num-threads", type=int, default=2)
    args = parser.parse_args()
    if args.kind == "diffusion" and args.teacher is not None:
        parser.error("--teacher trains a causal model: leave --kind diffusion out")
    if args.start is not None and args.kind == "diffusion":
        parser.error("--start goes on with a causal model: leave --kind diffusion out")
    if args.polish and args.start is None:
        parser.error("--polish continues the training of a model: give one with --start")
    return args


if __name__ == "__main__":
    main()
