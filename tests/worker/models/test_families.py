"""Every family generates the tokens of transformers, or of an independent reference if transformers
lacks the family, with any batches, chunks, prefix hits, pages and ranks; and each of its features,
broken on purpose, changes the logits."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from tests.support.checkpoints.families import SPECIMENS, cases, specimens, write_specimen
from tests.support.checkpoints.mutations import broken
from tests.support.effort import IS_LONG
from tests.support.engines.engine_driver import Engine, Outcome
from tests.support.engines.family_checks import (
    ALL_LENGTHS,
    GREEDY,
    LENGTHS,
    NUM_NEW,
    NUM_SCARCE,
    PAGE_SIZE,
    STEP_TOKENS,
    Checkpoint,
    greedy,
    make_prompts,
    scarce_pages,
)
from tests.support.engines.guided_engine import GuidedEngine, text_of
from tests.support.engines.plan_driver import Request, generate, make_runner
from tests.support.engines.threaded_group import run_ranks
from worker.models.layers.tensor_parallel import TensorParallelGroup
from worker.protocol.sampling import SamplingParams
from worker.protocol.structured import StructuredOutputsParams

pytestmark = pytest.mark.randomized  # with more tokens
FOUND = 1e-2
"""Minimum difference of logits (about 5 in size) that counts as detected."""
ROUNDING = 5e-4
"""Maximum difference of logits due to rounding. With Qwen3.5's experts it reaches 2.3e-4;
transformers' logits in fp32 differ from those in fp64 by 0.8e-4."""
WITH_EXPERTS = specimens(lambda specimen: specimen.num_experts and specimen.num_experts % 2 == 0)
"""Experts of an even number, which two ranks can share."""
REPEATS, LETTERS = ("{5,8}", 30) if IS_LONG else ("{3,4}", 20)
PATTERNS = (
    rf"(quick brown |lazy dog ){REPEATS}x",
    rf"[ab]{{{LETTERS}}}",
    r"[a-f]{2,6}(, [a-f]{2,6}){1,3}\.",
)
"""The first repeats n-grams; about half of the drafts for the second are right."""
PAGES = {"page_size": PAGE_SIZE, "max_num_batched_tokens": STEP_TOKENS, "kv_cache_tokens": 2048}


@pytest.fixture(scope="module", params=SPECIMENS)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    torch.set_num_threads(1)
    folder = Path(tmp_path_factory.mktemp(request.param))
    return Checkpoint(request.param, folder, write_specimen(request.param, folder))


@pytest.mark.checks("batched", "prefix hit", of=SPECIMENS)
@pytest.mark.parametrize(
    "checkpoint",
    [
        pytest.param(name, marks=pytest.mark.long if specimen.is_variant else ())
        for name, specimen in SPECIMENS.items()
    ],
    indirect=True,
)
def test_batched_then_hitting_prefixes(checkpoint: Checkpoint) -> None:
    prompts = make_prompts()
    with Engine(str(checkpoint.folder), kv_cache_tokens=4096) as engine:
        checkpoint.check(prompts, engine.generate(prompts, GREEDY))
        checkpoint.check(prompts, engine.generate(prompts, GREEDY))


@pytest.mark.checks("alone", of=SPECIMENS)
@pytest.mark.parametrize("checkpoint", cases("alone"), indirect=True)
def test_alone(checkpoint: Checkpoint) -> None:
    prompts = make_prompts()
    options = {"kv_cache_tokens": 4096, "enable_prefix_caching": False, "overlap_depth": 0}
    with Engine(str(checkpoint.folder), **options) as engine:
        outputs = [engine.generate([prompt], GREEDY)[0] for prompt in prompts]
    checkpoint.check(prompts, outputs)


@pytest.mark.checks("chunks", "scarce", of=SPECIMENS)
@pytest.mark.parametrize("checkpoint", cases("positions"), indirect=True)
def test_chunks_and_scarce_pages(checkpoint: Checkpoint) -> None:
    prompts = make_prompts(ALL_LENGTHS)
    with Engine(str(checkpoint.folder), **scarce_pages(str(checkpoint.folder))) as engine:
        outputs = engine.generate(prompts, greedy(NUM_SCARCE))
        assert engine.num_preemptions > 0, "pages were not scarce"
    checkpoint.check(prompts, outputs, NUM_SCARCE)


@pytest.mark.checks("TP 2", of=SPECIMENS)
@pytest.mark.parametrize("checkpoint", cases("shards"), indirect=True)
def test_two_ranks(checkpoint: Checkpoint) -> None:
    check_two_ranks(checkpoint)


def check_two_ranks(checkpoint: Checkpoint, **options: object) -> None:
    prompts = make_prompts(LENGTHS if IS_LONG else LENGTHS[1::2])

    def work(group: TensorParallelGroup) -> list[list[int]]:
        runner = make_runner(str(checkpoint.folder), group, tensor_parallel_size=2, **options)
        requests = [
            Request(prompt=prompt, slot=slot, arrival=2 * slot, new_tokens=NUM_NEW)
            for slot, prompt in enumerate(prompts)
        ]
        generate(runner, requests, chunk=64, page_seed=2)
        return [request.tokens for request in requests]

    first, second = run_ranks(2, work)
    assert first == second
    checkpoint.check(prompts, first)


@pytest.mark.checks("EP 2", of=WITH_EXPERTS)
@pytest.mark.parametrize("checkpoint", cases("experts", WITH_EXPERTS), indirect=True)
def test_two_ranks_with_whole_experts(checkpoint: Checkpoint) -> None:
    check_two_ranks(checkpoint, enable_expert_parallel=True)


@pytest.fixture(scope="module")
def guided(checkpoint: Checkpoint) -> list[Outcome]:
    """Outputs of requests with grammars, without drafts."""
    with GuidedEngine(str(checkpoint.folder), **PAGES) as engine:
        return engine.outcomes(make_prompts(), guided_sampling())


def guided_sampling() -> list[SamplingParams]:
    """The patterns in turn, greedy and sampled; in `make test` only the first one both ways."""
    return [
        SamplingParams(
            temperature=0.9 * (number % 2),
            seed=number,
            max_tokens=110,
            structured_outputs=StructuredOutputsParams(regex=PATTERNS[number % len(PATTERNS)]),
        )
        for number in range(len(LENGTHS))
    ]


@pytest.mark.checks("grammar", of=SPECIMENS, against="re")
@pytest.mark.parametrize("checkpoint", cases("cache"), indirect=True)
def test_outputs_conform_to_their_grammars(guided: list[Outcome]) -> None:
    for outcome, sampling in zip(guided, guided_sampling(), strict=True):
        assert outcome.finish_reason == "stop"
        assert sampling.structured_outputs is not None
        assert re.fullmatch(sampling.structured_outputs.regex or "", text_of(outcome.token_ids))


@pytest.mark.checks("drafts", of=SPECIMENS)
@pytest.mark.parametrize("checkpoint", cases("cache"), indirect=True)
def test_drafts_change_no_token(checkpoint: Checkpoint, guided: list[Outcome]) -> None:
    """Greedy tokens equal the model's; those under grammars equal those without drafts."""
    prompts = make_prompts()
    drafts = {"speculative_method": "ngram", "speculative_adaptive": False}
    with GuidedEngine(str(checkpoint.folder), **PAGES, **drafts) as engine:
        sampling = [*[GREEDY] * len(prompts), *guided_sampling()]
        outcomes = engine.outcomes([*prompts, *prompts], sampling)
        gate = engine.core.scheduler.steps.speculation
        assert gate is not None
        few = 20 if IS_LONG else 5
        assert gate.totals.num_accepted_tokens > few, "no draft was right: nothing was tried"
    checkpoint.check(prompts, [outcome.token_ids for outcome in outcomes[: len(prompts)]])
    assert outcomes[len(prompts) :] == guided


@pytest.mark.checks("mutations", of=SPECIMENS)
@pytest.mark.parametrize("checkpoint", cases("alone"), indirect=True)
def test_a_broken_feature_shows(checkpoint: Checkpoint, tmp_path: Path) -> None:
    prompt = make_prompts()[-1]
    expected = checkpoint.expected(prompt)[-1]
    assert difference(checkpoint.folder, prompt, expected) < ROUNDING, "nothing is broken yet"
    mutations = SPECIMENS[checkpoint.name].mutations
    unnoticed = []
    for feature, mutation in mutations.items():
        with broken(checkpoint.folder, mutation, tmp_path / feature) as folder:
            if difference(folder, prompt, expected) < FOUND:
                unnoticed.append(feature)
    assert mutations
    assert unnoticed == []


def difference(folder: Path, prompt: list[int], expected: torch.Tensor) -> float:
    """The largest difference of the logits after a prompt; infinite if the checkpoint lacks weights
    that the model needs."""
    request = Request(prompt=prompt, new_tokens=1)
    try:
        generate(make_runner(str(folder)), [request])
    except ValueError as error:
        if "disagree" not in str(error):
            raise
        return math.inf
    return (request.logits[0] - expected).abs().max().item()
