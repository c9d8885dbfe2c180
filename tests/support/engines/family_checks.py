"""Prompts for a family's checkpoint, and comparison of its tokens with a reference."""

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
"""Prompt lengths: within a page, several pages, longer than windows and chunks."""
NUM_NEW = 20 if IS_LONG else 6
"""Tokens per request; all but one request fill a page and start the next one."""
NUM_SCARCE = 20
"""Tokens per request in tests whose pages run out during decoding."""
PAGE_SIZE, STEP_TOKENS = 8, 32
"""Page size and token budget of tests with scarce pages and chunked prefill."""


def greedy(num_new: int) -> SamplingParams:
    """Greedy sampling of this number of tokens."""
    return SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)


GREEDY = greedy(NUM_NEW)


@dataclass(frozen=True)
class Checkpoint:
    name: str
    folder: Path
    model: Model
    known: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)
    """Logits, keyed by tokens; most tests have equal outputs."""

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
        """Checks that every token is the best after the same tokens, except for near ties."""
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
    """Options with chunked prefill and one block more than the longest request needs alone."""
    groups = make_runner(folder).hello().page_groups
    least = groups.num_pages(LENGTHS[-1] + NUM_SCARCE, PAGE_SIZE, STEP_TOKENS)
    tokens = (-(-least // groups.num_groups) + 1) * PAGE_SIZE
    return {
        "page_size": PAGE_SIZE,
        "max_num_batched_tokens": STEP_TOKENS,
        "kv_cache_tokens": tokens,
    }
