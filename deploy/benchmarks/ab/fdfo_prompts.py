"""Prompts of benchmark `fdfo`: questions, long uncached prompts, and replayed blocks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from deploy.benchmarks.ab.options import FdfoOptions
from worker.config import DEFAULT_PAGE_SIZE
from worker.protocol.text.tokenizer import load_tokenizer

_MOST_PROMPT_BLOCKS = 4
_VOCAB = 1000
"""Upper bound on the token ids in replayed prompts; within the vocabulary of every model."""

Prompts = Sequence[Sequence[int]]


def questions(options: FdfoOptions) -> tuple[list[list[int]], list[str]]:
    """Token ids of the questions, and the correct answers; the set is repeated `options.repeats`
    times.

    Raises:
        ValueError: the question file does not exist.
    """
    path = Path(options.questions) if options.questions else questions_of(options.engine.model)
    if not path.is_file():
        raise ValueError(f"question file {path} does not exist: set --questions")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rows = rows[: options.num_questions or len(rows)]
    tokenizer = load_tokenizer(options.engine.checkpoint)
    texts = [tokenizer.render_chat(row["messages"]) for row in rows]
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    return prompts * options.repeats, [row["answer"] for row in rows] * options.repeats


def questions_of(model: str) -> Path:
    """Path of MODEL_heldout.jsonl. If it does not exist and the model's name is NAME-SUFFIX, path
    of NAME_heldout.jsonl if that exists."""
    folder = Path(model)
    names = (folder.name, folder.name.rpartition("-")[0])
    paths = [folder.with_name(f"{name}_heldout.jsonl") for name in names if name]
    return next((path for path in paths if path.is_file()), paths[0])


def long_prompts(options: FdfoOptions, short_prompts: Prompts) -> list[list[int]]:
    """Token ids of prompts with random lengths, from 1/5 of `options.long_prompt_blocks` blocks to
    all of them. Each prompt is a series of questions; only the last one is to be answered."""
    rng = np.random.default_rng(0)
    size = options.engine.cache.page_size or DEFAULT_PAGE_SIZE
    most = options.long_prompt_blocks
    prompts = []
    for _ in range(options.num_long):
        length = int(rng.integers(most // 5, most + 1)) * size
        prompt: list[int] = []
        while len(prompt) < length:
            prompt = [*short_prompts[int(rng.integers(len(short_prompts)))], *prompt]
        prompts.append(prompt[-length:])
    return prompts


def replayed_requests(
    rounds_of_blocks: Mapping[int, int], block_size: int, count: int
) -> tuple[list[list[int]], list[int]]:
    """Prompts, and the number of rounds of each prompt's only block, sampled from the histogram.

    At a threshold of 1, a round decides one position. A request generates one block, which begins
    with the tail of its prompt, so the number of rounds is the number of remaining positions.

    Args:
        rounds_of_blocks: number of blocks, keyed by their number of rounds.
        block_size: positions per block.
        count: number of requests.

    Raises:
        ValueError: a number of rounds exceeds the block size.
    """
    if max(rounds_of_blocks) > block_size:
        raise ValueError(
            f"--replay-rounds must be at most {block_size} rounds, the block size of this model, "
            f"got {max(rounds_of_blocks)}"
        )
    rng = np.random.default_rng(0)
    weights = np.array(list(rounds_of_blocks.values()), dtype=float)
    rounds = rng.choice(list(rounds_of_blocks), size=count, p=weights / weights.sum()).tolist()
    prompts = []
    for number in rounds:
        whole = int(rng.integers(1, _MOST_PROMPT_BLOCKS + 1)) * block_size
        prompts.append(rng.integers(0, _VOCAB, whole + block_size - number).tolist())
    return prompts, rounds
