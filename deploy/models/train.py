"""Trains a demo model from scratch: ``python -m deploy.models.train --output deploy/models/demo``.

``--start deploy/models/demo`` continues with the second phase (tool calls), or with ``--polish``
with the third phase (sorting arbitrary words, out-of-scope messages). ``--teacher`` trains the
draft model, and ``--kind diffusion`` the block-diffusion model ``demo-diffusion``.

The command generates the corpus, trains the tokenizer and the model, and writes the checkpoint and,
next to it, the held-out questions. It takes less than an hour on two CPU cores.
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
_TOOLS_WARMUP_STEPS: Final = 20
_TOOLS_DECAY_FROM: Final = 0.7
_POLISHING_DECAY_FROM: Final = 0.35
"""Fraction of the third phase after which the learning rate decays. While it decays, sorting
improves fastest, and forgotten tasks recover."""
_TOOLS_SAVE_EVERY: Final = 20


def main() -> None:
    """Parses the command line and runs the training."""
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
        # Noisy copies make rows longer, and attention requires a mask.
        config = replace(
            config, max_length=_DIFFUSION_MAX_LENGTH, batch_tokens=_DIFFUSION_BATCH_TOKENS
        )
        DiffusionTraining(config, args.output, args.state).run()
    elif args.teacher is not None:
        # Rows that are longer than nearly all requests would take 1/3 of the time.
        config = replace(config, max_length=_DRAFT_MAX_LENGTH)
        DraftTraining(config, args.output, args.state).run()
    elif args.start is not None:
        # Nearly converged weights need smaller updates. Weight updates take 1/3 of a short step.
        config = replace(
            config,
            max_length=_TOOLS_MAX_LENGTH,
            batch_tokens=_TOOLS_BATCH_TOKENS,
            matrix_lr=_TOOLS_MATRIX_LR,
            other_lr=_TOOLS_OTHER_LR,
            warmup_steps=_TOOLS_WARMUP_STEPS,
            decay_from=_POLISHING_DECAY_FROM if args.polish else _TOOLS_DECAY_FROM,
            save_every=_TOOLS_SAVE_EVERY,
            log_every=_TOOLS_SAVE_EVERY,
        )
        ToolTraining(config, args.output, args.state).run()
    else:
        CausalTraining(config, args.output, args.state).run()


def _parse_args() -> argparse.Namespace:
    parser = CommandParser(description=__doc__, prog="python -m deploy.models.train")
    parser.add_argument("--output", type=Path, required=True, help="checkpoint folder to write")
    parser.add_argument(
        "--teacher", type=Path, help="trained model to distill into a small draft model"
    )
    parser.add_argument(
        "--start",
        type=Path,
        help="checkpoint to continue from: the previous phase's, or a draft model's",
    )
    parser.add_argument("--kind", choices=("causal", "diffusion"), default="causal")
    parser.add_argument(
        "--state",
        type=Path,
        help="file that stores the run's state; if it exists, the run is resumed",
    )
    parser.add_argument(
        "--polish",
        action="store_true",
        help="third phase (sorting arbitrary words, out-of-scope messages); requires --start",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-steps", type=int, default=4000)
    parser.add_argument("--num-threads", type=int, default=2)
    args = parser.parse_args()
    if args.kind == "diffusion" and args.teacher is not None:
        parser.error("--teacher trains a causal model: remove --kind diffusion")
    if args.start is not None and args.kind == "diffusion":
        parser.error("--start continues the training of a causal model: remove --kind diffusion")
    if args.polish and args.start is None:
        parser.error("--polish continues the training of a model: set --start")
    return args


if __name__ == "__main__":
    main()
