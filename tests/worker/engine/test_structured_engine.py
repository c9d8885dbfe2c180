"""Constrained requests through whole engines: every output matches, at every depth, also with
TP."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
import torch

from tests.support.effort import IS_LONG
from tests.support.engines.engine_driver import Engine, Outcome
from worker.core.grammar.matcher_state import MatcherState
from worker.protocol.sampling import SamplingParams
from worker.protocol.structured import StructuredOutputsParams, ThoughtTokens
from worker.protocol.text.tokenizer import Tokenizer, load_tokenizer

MODEL = "deploy/models/demo"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 3},
        "more": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["name", "age", "tags", "more"],
    "additionalProperties": False,
}
PHONE = r"\d{3}-\d{4}( ext \d{1,3})?"
FORMS: list[dict[str, Any]] = [
    {"json": SCHEMA},
    {"json": SCHEMA, "disable_any_whitespace": True},
    {"json": {"type": "string", "pattern": "^[a-z]+$", "maxLength": 9}},  # by llguidance
    {"regex": PHONE},
    {"choice": ["yes", "no", "maybe so"]},
    {"grammar": 'root ::= digit ("+" digit){0,5}\ndigit ::= [0-9]'},
]
THOUGHT = ThoughtTokens(opening=7, closing=9, is_open=True, budget=5)
"""Reasoning of at most five tokens, opened by the prompt."""
EXTRAS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.3},
    {"temperature": 1.3, "min_tokens": 6, "top_p": 0.9},
    {"temperature": 1.0, "ignore_eos": True, "frequency_penalty": 0.8, "logprobs": 2},
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    torch.set_num_threads(1)
    return load_tokenizer(MODEL)


def conforms(form: dict[str, Any], text: str) -> bool:
    if "json" in form:
        jsonschema.validate(json.loads(text), form["json"])
        return True
    if "choice" in form:
        return text in form["choice"]
    pattern = form.get("regex", r"\d(\+\d){0,5}")
    return re.fullmatch(pattern, text) is not None


def requests() -> list[tuple[dict[str, Any] | None, SamplingParams]]:
    """Each form greedy and at high temperature, some with other parameters, with unconstrained
    requests in between."""
    found: list[tuple[dict[str, Any] | None, SamplingParams]] = []
    for number, extra in enumerate(EXTRAS):
        for form in FORMS:
            params = StructuredOutputsParams(**form)
            found.append(
                (
                    form,
                    SamplingParams(max_tokens=200, seed=number, structured_outputs=params, **extra),
                )
            )
        found.append((None, SamplingParams(max_tokens=40, seed=number, **extra)))
        found.append((None, SamplingParams(max_tokens=40, seed=number, thought=THOUGHT, **extra)))
    return found


def run(engine: Engine, tokenizer: Tokenizer, limit: int | None = None) -> list[Outcome]:
    params = [sampling for _, sampling in requests()[:limit]]
    prompts = [tokenizer.encode(f"Tell me of {number}.") for number in range(len(params))]
    return engine.outcomes(prompts, params)


def text_of(outcome: Outcome, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(outcome.token_ids)  # end tokens have no text


@pytest.fixture(scope="module")
def outcomes(tokenizer: Tokenizer) -> dict[str, list[Outcome]]:
    """Outcomes of the same requests by depth, and with scarce pages."""
    found = {}
    settings: dict[str, dict[str, Any]] = {
        "depth 0": {"overlap_depth": 0},
        "depth 1": {"overlap_depth": 1},
        "scarce": {"overlap_depth": 1, "kv_cache_tokens": 256, "max_num_batched_tokens": 48},
    }
    for name, options in settings.items():
        with Engine(MODEL, batch_invariant=True, **options) as engine:
            found[name] = run(engine, tokenizer)
            if name == "scarce":
                assert engine.num_preemptions > 0
    return found


@pytest.mark.checks("grammar", of="Qwen3ForCausalLM", against="jsonschema and re")
def test_every_output_conforms(outcomes: dict[str, list[Outcome]], tokenizer: Tokenizer) -> None:
    for (form, _), outcome in zip(requests(), outcomes["depth 1"], strict=True):
        text = text_of(outcome, tokenizer)
        if form is not None:
            assert outcome.finish_reason == "stop", (form, text, outcome.error)
            assert conforms(form, text), (form, text)


def test_reasoning_ends_at_its_budget(outcomes: dict[str, list[Outcome]]) -> None:
    limited = [
        outcome.token_ids
        for (_, sampling), outcome in zip(requests(), outcomes["depth 1"], strict=True)
        if sampling.thought is not None
    ]
    assert len(limited) == len(EXTRAS)
    assert all(THOUGHT.closing in token_ids[:6] or len(token_ids) < 6 for token_ids in limited)
    assert any(token_ids[5:6] == [THOUGHT.closing] for token_ids in limited)


def test_masks_after_reasoning_would_change_no_token(
    outcomes: dict[str, list[Outcome]], tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MatcherState, "is_free", False)
    limited = [
        (number, sampling)
        for number, (_, sampling) in enumerate(requests())
        if sampling.thought is not None
    ]
    prompts = [tokenizer.encode(f"Tell me of {number}.") for number, _ in limited]
    with Engine(MODEL, batch_invariant=True, overlap_depth=1) as engine:
        masked = engine.outcomes(prompts, [sampling for _, sampling in limited])
    for (number, _), outcome in zip(limited, masked, strict=True):
        assert outcome.token_ids == outcomes["depth 1"][number].token_ids


@pytest.mark.randomized  # with more of them
def test_many_outputs_conform(tokenizer: Tokenizer) -> None:
    """Each form three times greedily, and six times sampled."""
    params = [
        SamplingParams(
            max_tokens=200,
            temperature=(0.0, 1.0, 1.3)[seed % 3],
            seed=seed,
            structured_outputs=StructuredOutputsParams(**FORMS[seed % len(FORMS)]),
        )
        for seed in range(500 if IS_LONG else 54)
    ]
    prompts = [tokenizer.encode(f"Tell me of {number}.") for number in range(len(params))]
    with Engine(MODEL) as engine:
        outcomes = engine.outcomes(prompts, params)
    for seed, outcome in enumerate(outcomes):
        form, text = FORMS[seed % len(FORMS)], text_of(outcome, tokenizer)
        assert outcome.finish_reason == "stop", (form, text, outcome.error)
        assert conforms(form, text), (form, text)


@pytest.mark.parametrize("other", ["depth 0", "scarce"])
def test_depth_and_preemption_change_no_token(
    outcomes: dict[str, list[Outcome]], other: str
) -> None:
    assert outcomes[other] == outcomes["depth 1"]


def test_two_ranks_draw_from_the_same_masks(tokenizer: Tokenizer) -> None:
    with Engine(MODEL, tensor_parallel_size=2, batch_invariant=True) as engine:
        for (form, _), outcome in zip(requests(), run(engine, tokenizer, 7), strict=False):
            assert form is None or conforms(form, text_of(outcome, tokenizer))


def test_parameters_that_leave_no_token_end_the_request_alone(tokenizer: Tokenizer) -> None:
    digits: dict[str, Any] = {"structured_outputs": StructuredOutputsParams(regex=PHONE)}
    banned: dict[str, Any] = {"bad_words_token_ids": tuple((token,) for token in range(4, 2560))}
    only: dict[str, Any] = {"allowed_token_ids": (tokenizer.token_id("a") or 0,)}
    params = [
        SamplingParams(max_tokens=20, temperature=1.0, top_p=0.5, seed=1, **digits, **banned),
        SamplingParams(max_tokens=20, temperature=0.0, **digits, **only),
        SamplingParams(max_tokens=20, temperature=0.0, **digits),
    ]
    with Engine(MODEL) as engine:
        dead, narrow, alive = engine.outcomes([tokenizer.encode("Hello")] * 3, params)
    assert (dead.finish_reason, narrow.finish_reason) == ("error", "error")
    assert "bad_words exclude every token" in (dead.error or "")
    assert "allowed_token_ids" in (narrow.error or "")
    assert re.fullmatch(PHONE, text_of(alive, tokenizer))
