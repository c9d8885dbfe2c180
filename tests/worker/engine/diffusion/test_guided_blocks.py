"""Grammars over blocks: every output matches, and does not depend on other requests."""

from __future__ import annotations

import re
import shutil
from itertools import pairwise
from typing import Any

import msgspec
import pytest
import torch

from tests.support.checkpoints.sdar import write_sdar
from tests.support.engines.block_engine import AheadEngine, is_ahead
from tests.support.engines.engine_driver import Engine, Outcome
from tests.support.paths import DEMO
from worker.core.grammar import matcher_state
from worker.protocol.diffusion import DiffusionParams
from worker.protocol.limits import refuse
from worker.protocol.messages import Submit
from worker.protocol.sampling import SamplingParams
from worker.protocol.structured import StructuredOutputsParams
from worker.protocol.text.tokenizer import Tokenizer, load_tokenizer

SIZE = 8
PHONE = r"\d{3}-\d{4}( ext \d{1,3})?"
LIST = r"[a-z]{2,6}(, [a-z]{2,6}){2,9}\."
PATTERNS = (PHONE, "yes|no|maybe so", LIST)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The demo model's vocabulary with random weights, in blocks."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("guided")
    write_sdar(folder, SIZE, sharpness=40.0, vocab_size=2560)
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    for name in (*names, "generation_config.json"):
        shutil.copy(DEMO / name, folder / name)
    return str(folder)


@pytest.fixture(scope="module")
def tokenizer(model: str) -> Tokenizer:
    return load_tokenizer(model)


def requests() -> list[tuple[str | None, SamplingParams]]:
    """Each pattern at several temperatures and thresholds, with unconstrained requests in
    between."""
    found: list[tuple[str | None, SamplingParams]] = []
    for number in range(12):
        pattern = (*PATTERNS, None)[number % 4]
        guide = None if pattern is None else StructuredOutputsParams(regex=pattern)
        sampling = SamplingParams(
            max_tokens=90,
            temperature=(0.0, 1.0, 1.5)[number % 3],
            seed=number,
            structured_outputs=guide,
            diffusion=DiffusionParams(threshold=(0.02, 0.3, 0.9)[number // 4]),
        )
        found.append((pattern, sampling))
    return found


def run(
    model: str, tokenizer: Tokenizer, engine_class: type[Engine] = Engine, **options: Any
) -> tuple[list[Outcome], Engine]:
    prompts = [tokenizer.encode(f"Tell me of {number}."[: 6 + number]) for number in range(12)]
    with engine_class(model, **{"kv_cache_tokens": 2048, **options}) as engine:
        return engine.outcomes(prompts, [sampling for _, sampling in requests()]), engine


@pytest.fixture(scope="module")
def alone(model: str, tokenizer: Tokenizer) -> list[Outcome]:
    return run(model, tokenizer, max_num_seqs=1)[0]


@pytest.mark.checks("grammar", of="SDARForCausalLM", against="jsonschema and re")
def test_every_output_conforms(alone: list[Outcome], tokenizer: Tokenizer) -> None:
    for (pattern, _), outcome in zip(requests(), alone, strict=True):
        if pattern is not None:
            assert outcome.finish_reason == "stop", outcome.error
            text = tokenizer.decode(outcome.token_ids)
            assert re.fullmatch(pattern, text), (pattern, text)


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 6, "dllm_fdfo": False},
        {"max_num_seqs": 6, "kv_cache_tokens": 128},
        pytest.param({"max_num_seqs": 6, "tensor_parallel_size": 2}, marks=pytest.mark.long),
        *(
            pytest.param({"max_num_seqs": 6, **options}, marks=pytest.mark.long)
            for options in (
                {},
                {"dllm_disable": ("inplace", "mixed_rounds")},
                {"dllm_disable": ("fused_commit", "skip_last_commit")},
            )
        ),
    ],
    ids=str,
)
def test_company_modes_and_preemption_change_no_token(
    model: str, tokenizer: Tokenizer, alone: list[Outcome], options: dict[str, Any]
) -> None:
    found, engine = run(model, tokenizer, **options)
    assert [one.token_ids for one in found] == [one.token_ids for one in alone]
    if options.get("kv_cache_tokens"):
        assert engine.num_preemptions > 0


def test_no_step_leaves_ahead_of_a_block_under_a_grammar(
    model: str, tokenizer: Tokenizer, alone: list[Outcome]
) -> None:
    """Only its matcher determines what may follow a round; unconstrained blocks do not wait."""
    found, engine = run(model, tokenizer, AheadEngine, max_num_seqs=12)
    assert [one.token_ids for one in found] == [one.token_ids for one in alone]
    assert isinstance(engine, AheadEngine)
    assert any(plan.masked for plan in engine.plans)
    for before, plan in pairwise(engine.plans):
        if is_ahead(plan):
            assert not plan.masked
            assert not before.masked


def test_several_tokens_of_a_round_count(model: str, tokenizer: Tokenizer) -> None:
    """A model with high confidence only needs a round per token where the grammar overrides it."""
    prompt = tokenizer.encode("Tell me.")
    rounds = {}
    for threshold in (0.0, 1.0):
        sampling = SamplingParams(
            max_tokens=40,
            temperature=0.0,
            ignore_eos=True,
            structured_outputs=StructuredOutputsParams(regex=r"[^q]{60,300}"),
            diffusion=DiffusionParams(threshold=threshold),
        )
        with Engine(model, kv_cache_tokens=1024) as engine:
            (outcome,) = engine.outcomes([prompt], sampling)
            totals = engine.core.scheduler.take_report().load.blocks
        assert totals is not None
        assert totals.num_tokens == len(outcome.token_ids)
        assert "q" not in tokenizer.decode(outcome.token_ids)
        rounds[threshold] = totals.num_rounds / len(outcome.token_ids)
    assert rounds[1.0] == 1.0
    assert rounds[0.0] < 0.5


def test_nobody_waits_for_a_slow_grammar(
    model: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its second token on, a request is left out until its grammar has accepted the last
    one."""
    monkeypatch.setattr(matcher_state, "SLOW_S", -1.0)
    monkeypatch.setattr(matcher_state, "CREDIT_S", 60.0)
    guided = [(pattern, one) for pattern, one in requests() if pattern is not None]
    with Engine(model, kv_cache_tokens=1024, max_num_seqs=4) as engine:
        outputs = dict(engine.submit(tokenizer.encode("Tell me."), one) for _, one in guided)
        num_held = 0
        while engine.core.grammars.num_due or engine.core.has_work():
            engine.core.take_grammars(wait=not engine.core.has_work())
            engine.step(outputs)
            num_held += len(engine.core.scheduler.state.held)
    assert num_held > 20
    for (pattern, _), outcome in zip(guided, outputs.values(), strict=True):
        assert outcome.finish_reason == "stop", outcome.error
        assert re.fullmatch(pattern, tokenizer.decode(outcome.token_ids))


def test_an_algorithm_that_edits_is_refused(model: str) -> None:
    guide = StructuredOutputsParams(regex=PHONE)
    editing = DiffusionParams(algorithm="JointThreshold")
    keeping = DiffusionParams(algorithm="LowConfidence")
    with Engine(model, kv_cache_tokens=64, dllm_algorithm="JointThreshold") as engine:
        info = engine.core.info
    assert info.dllm_algorithm == "JointThreshold"
    for server, own, is_refused in (
        ("LowConfidence", None, False),
        ("LowConfidence", editing, True),
        ("JointThreshold", None, True),
        ("JointThreshold", keeping, False),
    ):
        sampling = SamplingParams(structured_outputs=guide, diffusion=own)
        submit = Submit(request_id="a", gateway_id="g", prompt=b"\1\0\0\0", sampling=sampling)
        rejection = refuse(submit, msgspec.structs.replace(info, dllm_algorithm=server))
        assert (rejection is not None) == is_refused
        if rejection is not None:
            assert "not supported with JointThreshold" in rejection.message
