"""What a family's checkpoint is asked, and what its tokens are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from tests.support.checkpoints.specimen import VOCAB_SIZE, Model
from tests.support.effort import IS_LONG
from tests.support.engines.plan_driver import make_runner
from worker.protocol.sampling import SamplingParams

NEAR_TIE = 1e-4
ALL_LENGTHS = (3, 28, 29, 47, 62, 110)
LENGTHS = ALL_LENGTHS if IS_LONG else (3, 29, 62, 110)
"""Tokens of prompts: within a page, of some pages, longer than windows and chunks."""
NUM_NEW = 20 if IS_LONG else 6
"""Tokens per request: all but one end a page and begin the next."""
NUM_SCARCE = 20
"""Where pages are to run out while requests decode."""
PAGE_SIZE, STEP_TOKENS = 8, 32
"""Where pages are scarce and prompts come in chunks."""


def greedy(num_new: int) -> SamplingParams:
    """So many of the best tokens."""
    return SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)


GREEDY = greedy(NUM_NEW)


@dataclass(frozen=True)
class Checkpoint:
    name: str
    folder: Path
    model: Model
    known: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)
    """Logits by tokens: outputs are the same in most tests."""

    def expected(self, tokens: list[int]) -> torch.Tensor:
        """The model's logits [tokens, vocabulary]."""
        key = tuple(tokens)
        if key not in self.known:
            with torch.inference_mode():
                self.known[key] = self.model(torch.tensor([tokens])).logits[0]
        return self.known[key]

    def check(
        self, prompts: list[list[int]], outputs: list[list[int]], num_new: int = NUM_NEW
    ) -> None:
        """Every token is the best after the same tokens, near ties aside."""
        for prompt, output in zip(prompts, outputs, strict=True):
            assert len(output) == num_new
            logits = self.expected(prompt + output[:-1])[len(prompt) - 1 :]
            best = logits.max(dim=-1).values
            chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
            assert (best - chosen < NEAR_TIE).all()


def make_prompts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, VOCAB_SIZE, length).tolist() for length in lengths]


def scarce_pages(folder: str) -> dict[str, int]:
    """Options with a block more than what the longest request takes alone, and chunks."""
    groups = make_runner(folder).hello().page_groups
    least = groups.num_pages(LENGTHS[-1] + NUM_SCARCE, PAGE_SIZE, STEP_TOKENS)
    tokens = (-(-least // groups.num_groups) + 1) * PAGE_SIZE
    return {
        "page_size": PAGE_SIZE,
        "max_num_batched_tokens": STEP_TOKENS,
        "kv_cache_tokens": tokens,
    }
