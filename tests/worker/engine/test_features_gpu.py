"""Features beside plain steps change no token on CUDA: drafts, grammars, pages in host memory,
logits processors, ranks that share the device."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints.dense import write_checkpoint
from tests.support.engines.engine_driver import Engine, Outcome
from tests.support.engines.preempted_requests import CACHE_TOKENS, run, submits
from tests.support.engines.speculation_cases import (
    DRAFT,
    NGRAM,
    SETTINGS,
    SpeculatingEngine,
    check_grammars,
    prompts,
    settings,
)
from worker.protocol.messages import Submit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NUM_PROMPTS = 27
CUDA: dict[str, Any] = {"device": "cuda", "dtype": "float32"}


@pytest.fixture(scope="module")
def plain() -> list[Outcome]:
    """Outcomes of sequential steps without graphs."""
    options = {**CUDA, "overlap_depth": 0, "enforce_eager": True}
    with SpeculatingEngine(kv_cache_tokens=16384, **options) as engine:
        return engine.outcomes(prompts(NUM_PROMPTS), settings(NUM_PROMPTS))


@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_tokens": 16384},
        {**NGRAM, "kv_cache_tokens": 16384},
        {**NGRAM, "kv_cache_tokens": 512, "at_random": True, "max_num_batched_tokens": 64},
        {**DRAFT, "kv_cache_tokens": 2048},
        {**NGRAM, "kv_cache_tokens": 2048, "host_cache_gib": 0.1, "host_cache_policy": "always"},
    ],
    ids=str,
)
def test_drafts_grammars_and_rules(plain: list[Outcome], options: dict[str, Any]) -> None:
    with SpeculatingEngine(**CUDA, **options) as engine:
        outcomes = engine.outcomes(prompts(NUM_PROMPTS), settings(NUM_PROMPTS))
        assert "speculative_method" not in options or engine.num_accepted > 0
    assert check_grammars(outcomes) > 2
    for number, (expected, outcome) in enumerate(zip(plain, outcomes, strict=True)):
        setting = SETTINGS[number % len(SETTINGS)]
        assert outcome.token_ids == expected.token_ids, setting
        assert outcome.finish_reason == expected.finish_reason, setting


def test_ranks_on_one_device_draft_alike() -> None:
    found = []
    for drafts in ({}, NGRAM):
        options = {**CUDA, **drafts, "tensor_parallel_size": 2, "kv_cache_tokens": 16384}
        with SpeculatingEngine(**options) as engine:
            outcomes = engine.outcomes(prompts(9), settings(9))
            found.append([one.token_ids for one in outcomes])
            assert not drafts or engine.num_accepted > 0
    assert found[0] == found[1]


def test_preempted_requests_read_their_pages_back(tmp_path: Path) -> None:
    write_checkpoint("qwen3", tmp_path)
    rng = random.Random(1)
    requests = submits(rng)[:32]
    options: dict[str, Any] = {**CUDA, "batch_invariant": True, "preempt_priority_gap": 0}
    with Engine(str(tmp_path), **options, kv_cache_tokens=16384) as engine:
        undisturbed = run(engine, {0: requests})
    arrivals: dict[int, list[Submit]] = {}
    for one in requests:
        arrivals.setdefault(rng.randrange(200 if one.priority == 9 else 30), []).append(one)
    with Engine(
        str(tmp_path),
        **options,
        kv_cache_tokens=CACHE_TOKENS,
        page_size=4,
        max_num_seqs=3,
        max_num_batched_tokens=64,
        host_cache_gib=0.01,
        host_cache_policy="always",
    ) as engine:
        assert run(engine, arrivals) == undisturbed
        assert engine.num_preemptions > 0, "nobody was preempted"
        totals = engine.core.scheduler.take_report().load.host_cache
        assert totals is not None
        assert totals.num_loaded > 0, "nothing came back from host memory"
