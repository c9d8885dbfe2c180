"""Drafts change no token, with any drafts, logits processors and scarce resources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.campaigns.speculation import differing_texts
from tests.support.effort import IS_LONG
from tests.support.engines.engine_driver import Engine, Outcome
from tests.support.engines.forked_rank import forking_ranks
from tests.support.engines.speculation_cases import (
    DRAFT,
    NGRAM,
    SETTINGS,
    SpeculatingEngine,
    check_grammars,
    prompts,
    run_in_waves,
    settings,
)
from worker.plan.plan import DraftRow, Plan
from worker.protocol.sampling import SamplingParams
from worker.rank.speculation.drafter import DraftedStep
from worker.rank.verification import NO_ROW

pytestmark = pytest.mark.randomized  # with more prompts
NUM_PROMPTS = (3 if IS_LONG else 2) * len(SETTINGS)
NUM_IN_WAVES = 18 if IS_LONG else 10


def run(engine: Engine, count: int = NUM_PROMPTS) -> list[Outcome]:
    return engine.outcomes(prompts(count), settings(count))


@pytest.fixture(scope="module")
def plain() -> list[Outcome]:
    torch.set_num_threads(1)
    with SpeculatingEngine(kv_cache_tokens=16384) as engine:
        return run(engine)


@pytest.mark.checks("drafts", of="Qwen3ForCausalLM", against="plain decoding")
@pytest.mark.parametrize(
    "options",
    [
        {"overlap_depth": 0, "at_random": True, "max_num_batched_tokens": 40},
        {"overlap_depth": 1, "at_random": True, "kv_cache_tokens": 192},
        {"overlap_depth": 1, "speculative_adaptive": True},
        {"overlap_depth": 1, **DRAFT, "at_random": True, "kv_cache_tokens": 448},
        *(
            pytest.param(options, marks=pytest.mark.long)
            for options in (
                {"overlap_depth": 0},
                {"overlap_depth": 1, "num_speculative_tokens": 40, "kv_cache_tokens": 2048},
                {"overlap_depth": 1},
                {"overlap_depth": 1, "num_speculative_tokens": 1},
                {"overlap_depth": 1, "at_random": True},
                {"overlap_depth": 1, "kv_cache_tokens": 320},
                {"overlap_depth": 0, **DRAFT, "kv_cache_tokens": 2048},
                {"overlap_depth": 1, **DRAFT, "speculative_adaptive": True},
            )
        ),
    ],
    ids=str,
)
def test_outcomes_are_those_of_plain_decoding(
    plain: list[Outcome], options: dict[str, Any]
) -> None:
    with SpeculatingEngine(**{"kv_cache_tokens": 16384, **NGRAM, **options}) as engine:
        outcomes = run(engine)
        assert engine.num_accepted > 0, "no draft was right: nothing was tried"
        if engine.config.cache.kv_cache_tokens == 192:
            assert engine.num_preemptions > 0, "pages were not scarce"
    assert check_grammars(outcomes) > 2
    for setting, (expected, outcome) in enumerate(zip(plain, outcomes, strict=True)):
        assert outcome == expected, SETTINGS[setting % len(SETTINGS)]


def test_a_model_that_drafts_for_itself_is_always_right() -> None:
    # In the data type of drafts, so that both are bitwise equal.
    with SpeculatingEngine(**DRAFT, kv_cache_tokens=4096, dtype="bfloat16") as engine:
        prompts = [[9 + i, *range(40, 70)] for i in range(6)]
        for temperature in (0.0, 1.3):
            engine.generate(
                prompts,
                SamplingParams(temperature=temperature, top_p=0.9, seed=3, max_tokens=30),
            )
        gate = engine.core.scheduler.steps.speculation
        assert gate is not None
        assert gate.totals.num_draft_tokens == gate.totals.num_accepted_tokens > 100


def test_a_draft_model_must_share_the_vocabulary(tiny_chat_model: Path) -> None:
    options = {**DRAFT, "speculative_model": str(tiny_chat_model)}
    with pytest.raises(ValueError, match="use a draft model with the same tokenizer"):
        SpeculatingEngine(kv_cache_tokens=4096, **options)


def test_ranks_draft_alike() -> None:
    options: dict[str, Any] = {"tensor_parallel_size": 2, "kv_cache_tokens": 16384}
    with SpeculatingEngine(**options) as engine:
        expected = run(engine, 9)
    with SpeculatingEngine(**options, **NGRAM, at_random=True) as engine:
        assert run(engine, 9) == expected
        assert engine.num_accepted > 0


def test_requests_that_come_in_waves_and_come_again_from_the_cache() -> None:
    texts, sampling = prompts(NUM_IN_WAVES), settings(NUM_IN_WAVES)
    options: dict[str, Any] = {"kv_cache_tokens": 1536, "max_num_batched_tokens": 64}
    with SpeculatingEngine(**options) as engine:
        expected = run_in_waves(engine, texts, sampling)
        assert run_in_waves(engine, texts, sampling) == expected
    with SpeculatingEngine(**options, **NGRAM, num_speculative_tokens=4) as engine:
        assert run_in_waves(engine, texts, sampling) == expected
        before = engine.num_accepted
        assert run_in_waves(engine, texts, sampling) == expected
        assert engine.num_accepted > before > 0


@pytest.mark.parametrize("depth", [0, 1])
def test_drafts_after_a_short_last_chunk_change_no_token(depth: int) -> None:
    # A step leaves one token of the prompt; the slot was used by another request before.
    text = prompts(3)[2] * 3
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    options: dict[str, Any] = {"max_num_batched_tokens": 16, "kv_cache_tokens": 4096}
    found = []
    for speculation in ({}, NGRAM):
        with SpeculatingEngine(**options, **speculation, overlap_depth=depth) as engine:
            engine.generate([text[7:90]], greedy)
            found.append([engine.outcomes([text[i : i + 17]], [greedy]) for i in range(4)])
            if speculation:
                assert engine.num_accepted > 0
    assert found[0] == found[1]


def test_texts_end_at_their_stop_strings() -> None:
    with forking_ranks():
        assert differing_texts(NGRAM, num_prompts=6) == (0, 6)


def test_nothing_is_computed_behind_the_end_of_a_request() -> None:
    texts = prompts(NUM_PROMPTS)[:8]
    num_speculative = [0, 0]
    with SpeculatingEngine(**NGRAM, kv_cache_tokens=4096, overlap_depth=1) as engine:
        drafter = engine.runner._drafter
        assert drafter is not None
        place = drafter.place

        def counting(plan: Plan) -> DraftedStep | None:
            step = place(plan)
            if step is not None:
                num_speculative[0] += sum(isinstance(row, DraftRow) for row in plan.rows)
                num_speculative[1] += sum(isinstance(row, DraftRow) for row in step.plan.rows)
                assert (NO_ROW in step.row_of) == (len(step.plan.rows) < len(plan.rows))
            return step

        drafter.place = counting  # type: ignore[method-assign]
        outcomes = engine.outcomes(texts, SamplingParams(temperature=0.0, max_tokens=60))
    assert all(outcome.finish_reason == "stop" for outcome in outcomes)
    planned, computed = num_speculative
    assert planned - computed >= len(texts), "the step behind an end is planned, and left out"
