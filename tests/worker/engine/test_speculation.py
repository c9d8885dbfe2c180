"""Drafting changes no token: whatever is drafted, whenever, under every rule and shortage."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import Engine, Outcome

from worker.request import Request
from worker.speculative.gate import SpeculationGate
from worker.wire.sampling import SamplingParams
from worker.wire.structured import StructuredOutputsParams
from worker.wire.tokenizer import load_tokenizer

MODEL = "deploy/models/demo"
NUM_PROMPTS = 24
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "top_p": 0.95, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    {"temperature": 0.0, "presence_penalty": 0.7, "logprobs": 3},
    {"temperature": 0.7, "min_p": 0.05, "logit_bias": {40: 1.5, 17: -2.0}, "logprobs": 1},
    {"temperature": 1.3, "top_p": 0.9, "min_tokens": 30, "prompt_logprobs": 1},
    {"temperature": 0.0, "structured_outputs": StructuredOutputsParams(regex="(ab|cd ){2,30}x")},
    {
        "temperature": 0.7,
        "frequency_penalty": 0.3,
        "logprobs": 2,
        "structured_outputs": StructuredOutputsParams(
            json={"type": "array", "items": {"enum": ["red", "blue"]}, "minItems": 5, "maxItems": 9}
        ),
    },
]
DRAFT: dict[str, Any] = {"speculative_method": "draft", "speculative_model": MODEL}
"""The model drafts for itself: where no rule interferes, all its drafts are right."""
SPECULATION: dict[str, Any] = {"speculative_method": "ngram", "speculative_adaptive": False}


class RandomGate(SpeculationGate):
    """Any number of drafts at any time."""

    random = random.Random(5)

    def num_drafts(self, request: Request) -> int:
        most = self.config.num_speculative_tokens
        return self.random.choice((0, 0, self.random.randint(0, most)))


class SpeculatingEngine(Engine):
    """Draws its gate's decisions where `at_random`."""

    def __init__(self, *, at_random: bool = False, **options: Any) -> None:
        super().__init__(MODEL, batch_invariant=True, max_model_len=1024, **options)
        gate = self.core.scheduler._speculation
        if at_random:
            assert gate is not None
            random_gate = RandomGate(gate.config)
            self.core.scheduler._speculation = random_gate
            self.core.scheduler._filler._speculation = random_gate

    @property
    def num_accepted(self) -> int:
        gate = self.core.scheduler._speculation
        assert gate is not None
        return gate.totals.num_accepted_tokens


def run(engine: Engine) -> list[Outcome]:
    tokenizer = load_tokenizer(MODEL)
    lines = Path("deploy/models/demo_heldout.jsonl").read_text().splitlines()[:NUM_PROMPTS]
    return engine.outcomes(
        [tokenizer.encode(json.dumps(json.loads(line)["messages"])) for line in lines],
        [
            SamplingParams(
                seed=i, max_tokens=50 + i % 3, ignore_eos=i % 3 == 0, **SETTINGS[i % len(SETTINGS)]
            )
            for i in range(NUM_PROMPTS)
        ],
    )


@pytest.fixture(scope="module")
def plain() -> list[Outcome]:
    torch.set_num_threads(1)
    with SpeculatingEngine(kv_cache_tokens=16384) as engine:
        return run(engine)


@pytest.mark.parametrize(
    "options",
    [
        {"overlap_depth": 0},
        {"overlap_depth": 1},
        {"overlap_depth": 1, "num_speculative_tokens": 1},
        {"overlap_depth": 1, "num_speculative_tokens": 40, "kv_cache_tokens": 2048},
        {"overlap_depth": 0, "at_random": True, "max_num_batched_tokens": 40},
        {"overlap_depth": 1, "at_random": True},
        {"overlap_depth": 1, "at_random": True, "kv_cache_tokens": 768},
        {"overlap_depth": 1, "speculative_adaptive": True},
        {"overlap_depth": 0, **DRAFT, "kv_cache_tokens": 2048},
        {"overlap_depth": 1, **DRAFT, "at_random": True, "kv_cache_tokens": 640},
        {"overlap_depth": 1, **DRAFT, "speculative_adaptive": True},
    ],
    ids=str,
)
def test_outcomes_are_those_of_plain_decoding(
    plain: list[Outcome], options: dict[str, Any]
) -> None:
    with SpeculatingEngine(**{"kv_cache_tokens": 16384, **SPECULATION, **options}) as engine:
        outcomes = run(engine)
        assert engine.num_accepted > 0, "no draft was right: nothing was tried"
        if engine.config.kv_cache_tokens == 768:
            assert engine.num_preemptions > 0, "pages were not scarce"
    for setting, (expected, outcome) in enumerate(zip(plain, outcomes, strict=True)):
        assert outcome == expected, SETTINGS[setting % len(SETTINGS)]


def test_a_model_that_drafts_for_itself_is_always_right() -> None:
    with SpeculatingEngine(**{**SPECULATION, **DRAFT}, kv_cache_tokens=4096) as engine:
        prompts = [[9 + i, *range(40, 70)] for i in range(6)]
        for temperature in (0.0, 1.3):
            engine.generate(
                prompts,
                SamplingParams(temperature=temperature, top_p=0.9, seed=3, max_tokens=30),
            )
        gate = engine.core.scheduler._speculation
        assert gate is not None
        assert gate.totals.num_draft_tokens == gate.totals.num_accepted_tokens > 100


def test_a_draft_model_must_share_the_vocabulary(tiny_chat_model: Path) -> None:
    options = {**SPECULATION, **DRAFT, "speculative_model": str(tiny_chat_model)}
    with pytest.raises(ValueError, match="must share a tokenizer"):
        SpeculatingEngine(kv_cache_tokens=4096, **options)


def test_ranks_draft_alike() -> None:
    options: dict[str, Any] = {"tensor_parallel_size": 2, "kv_cache_tokens": 16384}
    with SpeculatingEngine(**options) as engine:
        expected = run(engine)
    with SpeculatingEngine(**options, **SPECULATION, at_random=True) as engine:
        assert run(engine) == expected
        assert engine.num_accepted > 0
