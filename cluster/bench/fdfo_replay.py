"""Blocks whose rounds are given: what a schedule is worth at sizes that have no weights here.

At a threshold of 1 a round decides one position. So a request of one block, which shares that with
the tail of its prompt, takes as many rounds as the tail leaves positions. Neither accuracy nor
tokens per forward pass mean anything here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import numpy as np

from cluster.bench.alternate import alternate
from cluster.bench.fdfo_engine import FdfoEngine, FdfoTurn
from cluster.bench.fdfo_options import ARMS, FdfoOptions, arm_config
from cluster.bench.model_shapes import BLOCK_SHAPES, write_shape
from cluster.bench.report import Result

_NUM_REQUESTS = 64
_MOST_PROMPT_BLOCKS = 4
_VOCAB = 1000
"""Prompts are of token ids below it, which any vocabulary has."""


def parse_replay(text: str) -> dict[int, int]:
    """`1:151,2:39` as how many blocks take how many rounds.

    Raises:
        ValueError: it is of another form.
    """
    try:
        pairs = [pair.split(":") for pair in text.split(",") if pair]
        found = {int(rounds): int(blocks) for rounds, blocks in pairs}
    except ValueError as error:
        raise ValueError(f"--replay-rounds {text}: give ROUNDS:BLOCKS,...") from error
    if any(rounds < 1 or blocks < 1 for rounds, blocks in found.items()):
        raise ValueError("--replay-rounds needs numbers of at least 1")
    return found


def replayed_requests(
    rounds_of_blocks: Mapping[int, int], block_size: int, count: int
) -> tuple[list[list[int]], list[int]]:
    """Prompts, and the rounds of each one's only block, drawn from the histogram.

    Raises:
        ValueError: a block cannot take so many rounds.
    """
    if max(rounds_of_blocks) > block_size:
        raise ValueError(f"--replay-rounds: a block of this model takes at most {block_size}")
    rng = np.random.default_rng(0)
    weights = np.array(list(rounds_of_blocks.values()), dtype=float)
    rounds = rng.choice(list(rounds_of_blocks), size=count, p=weights / weights.sum()).tolist()
    prompts = []
    for number in rounds:
        whole = int(rng.integers(1, _MOST_PROMPT_BLOCKS + 1)) * block_size
        prompts.append(rng.integers(0, _VOCAB, whole + block_size - number).tolist())
    return prompts, rounds


def replay_turns(options: FdfoOptions, running: int) -> dict[str, list[FdfoTurn]]:
    """Every arm over the same requests, in turn."""
    with ExitStack() as stack:
        engine = replace(options.engine, dllm_algorithm="LowConfidence", dllm_threshold=1.0)
        if engine.model in BLOCK_SHAPES:
            directory = stack.enter_context(tempfile.TemporaryDirectory())
            engine = replace(engine, model=write_shape(engine.model, directory))
        engines = {
            name: stack.enter_context(FdfoEngine(arm_config(engine, arm, running)))
            for name, arm in ARMS.items()
        }
        size = engines["full"].block_size
        count = options.num_questions or _NUM_REQUESTS
        prompts, rounds = replayed_requests(options.replay, size, count)
        arms = {name: partial(own.turn, prompts, rounds) for name, own in engines.items()}
        trial = alternate(arms, 1)["full"][0]
        found = [answer.rounds for answer in trial.answers]
        assert found == [[number] for number in rounds], "a round decides one position"
        return alternate(arms, options.pairs)


def labels(options: FdfoOptions) -> Result:
    """What says of the figures that they are a replay's."""
    weights = "random" if options.engine.load_format == "dummy" else "of the checkpoint"
    return {"replayed_rounds": dict(options.replay), "weights": weights}
