"""Runs the same prompts on engines with different options, and has their reference tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from tests.support.checkpoints.dense import VOCAB_SIZE
from tests.support.effort import IS_LONG
from tests.support.engines.engine_driver import Engine, Outcome
from worker.protocol.sampling import SamplingParams

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
NEAR_TIE = 1e-4
LONGEST = 700 if IS_LONG else 400
"""Length of the longest prompt; batch-invariant attention splits it at least once."""
NUM_NEW = 64 if IS_LONG else 24
"""Tokens per request; enough to fill the page in which the prompt ends and to start the next
one."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
SCARCE_TOKENS = 960 if IS_LONG else 496
"""KV cache size that is large enough for the longest request, but not for a batch of 10."""
EVERY = slice(None)


@dataclass(frozen=True)
class Checkpoint:
    name: str
    folder: str
    model: PreTrainedModel


def make_prompts(number: int = 20) -> list[list[int]]:
    """Prompts of 3 to LONGEST tokens."""
    rng = np.random.default_rng(11)
    lengths = np.geomspace(3, LONGEST, number).astype(int)
    return [rng.integers(0, VOCAB_SIZE, length).tolist() for length in lengths]


def seeded_params() -> list[SamplingParams]:
    """Alternating greedy and sampled requests, with every filter and log-probabilities."""
    sampled: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 20},
        {"temperature": 1.3, "top_p": 0.9},
        {"temperature": 0.9, "min_p": 0.05},
    ]
    return [
        SamplingParams(
            seed=100 + i, max_tokens=NUM_NEW, ignore_eos=True, logprobs=3, **sampled[i % 5]
        )
        for i in range(20)
    ]


class Settings:
    """Runs the same prompts on engines with different options."""

    def __init__(self, folder: str, params: list[SamplingParams], **options: Any) -> None:
        self._folder = folder
        self._params = params
        self._options = options
        self._prompts = make_prompts(len(params))

    def alone(self, some: slice = EVERY) -> list[Outcome]:
        """Outcomes of some prompts that run one by one, which takes more steps than all other
        settings."""
        with self._engine(enable_prefix_caching=False, overlap_depth=0) as engine:
            pairs = list(zip(self._prompts, self._params, strict=True))[some]
            return [engine.outcomes([prompt], [one])[0] for prompt, one in pairs]

    def batched_then_cached(self) -> tuple[list[Outcome], list[Outcome]]:
        with self._engine() as engine:
            batched = engine.outcomes(self._prompts, self._params)
            return batched, engine.outcomes(self._prompts, self._params)

    def chunked(self) -> list[Outcome]:
        with self._engine(max_num_batched_tokens=32) as engine:
            return engine.outcomes(self._prompts, self._params)

    def scarce(self) -> list[Outcome]:
        with self._engine(kv_cache_tokens=SCARCE_TOKENS) as engine:
            outputs = engine.outcomes(self._prompts, self._params)
            assert engine.num_preemptions > 0, "pages were not scarce"
            return outputs

    def tensor_parallel(self) -> list[Outcome]:
        """Outcomes with TP 2, scarce pages and chunked prefill."""
        with self._parallel_engine() as engine:
            return engine.outcomes(self._prompts, self._params)

    def tensor_parallel_and_alone(self) -> tuple[list[Outcome], list[Outcome]]:
        """Outcomes with TP 2, scarce pages and chunked prefill, and outcomes of every other prompt
        alone.

        Uses every filter. If several ranks share a processor, their steps take many times as long
        as those of a single rank.
        """
        with self._parallel_engine() as engine:
            together = engine.outcomes(self._prompts, self._params)
            pairs = list(zip(self._prompts, self._params, strict=True))[1::2]
            return together[1::2], [engine.outcomes([prompt], [one])[0] for prompt, one in pairs]

    def _parallel_engine(self) -> Engine:
        return self._engine(
            tensor_parallel_size=2, kv_cache_tokens=SCARCE_TOKENS, max_num_batched_tokens=256
        )

    def _engine(self, **options: Any) -> Engine:
        return Engine(self._folder, **{"kv_cache_tokens": 16384, **self._options, **options})


def assert_greedy_of_transformers(
    model: PreTrainedModel, prompts: list[list[int]], outputs: list[Outcome]
) -> None:
    """Checks that every token is the reference's best after the same tokens, except for near
    ties."""
    near_ties = 0
    for prompt, outcome in zip(prompts, outputs, strict=True):
        output = outcome.token_ids
        assert len(output) == NUM_NEW
        logits = _logits(model, (*prompt, *output[:-1]))[len(prompt) - 1 :]
        best, second = logits.topk(2, dim=-1).values.unbind(-1)
        for token, row, gap in zip(output, logits, best - second, strict=True):
            if token != row.argmax():
                assert gap < NEAR_TIE
                near_ties += 1
    assert near_ties <= 1


@lru_cache(maxsize=20)  # most settings generate the same tokens
def _logits(model: PreTrainedModel, tokens: tuple[int, ...]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits
