"""Prompts and checks of `make check-real`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from tests.campaigns.real.embeddings import PAIRS, judge_vectors, make_texts
from tests.campaigns.real.main import RealModelOptions, _schema_fault, judge
from tests.campaigns.real.prompts import LONG_TOKENS, make_prompts
from tests.campaigns.real.reference import Difference, Reference, perplexity
from tests.campaigns.real.schemas import schemas
from tests.support.engines.engine_driver import Engine, Outcome
from tests.support.paths import DEMO
from worker.protocol.messages import TokenLogprobs
from worker.protocol.sampling import SamplingParams
from worker.protocol.text.tokenizer import load_tokenizer

SAME = Difference(wrong_tokens=0, near_ties=1, logprob=1e-4)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(DEMO)


def test_each_difference_counts() -> None:
    def failing(**changed: Any) -> set[str]:
        one = Difference(**{"wrong_tokens": 0, "near_ties": 0, "logprob": 0.0, **changed})
        return {check.name for check in judge("part", [SAME, one], {}) if not check.holds}

    assert failing() == set()
    assert failing(near_ties=9) == set()
    assert failing(wrong_tokens=1) == {"part_wrong_tokens"}
    assert failing(logprob=0.1) == {"part_logprobs"}


@pytest.mark.slow
def test_a_wrong_token_and_a_wrong_logprob_are_found(reference: Reference) -> None:
    prompt = load_tokenizer(str(DEMO)).encode("What is 3 + 4?")
    with Engine(str(DEMO)) as engine:
        params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=2)
        [outcome] = engine.outcomes([prompt], params)
    [found] = reference.compare([prompt], [outcome])
    assert (found.wrong_tokens, found.logprob < 1e-3) == (0, True)
    first = outcome.logprobs[0]
    shifted = TokenLogprobs.pack(first.token_ids, [x - 0.5 for x in first.logprobs], first.rank)
    other = Outcome(token_ids=outcome.token_ids, logprobs=[shifted, *outcome.logprobs[1:]])
    assert reference.compare([prompt], [other])[0].logprob == pytest.approx(0.5, abs=1e-3)
    tokens = [outcome.token_ids[0] + 1, *outcome.token_ids[1:]]
    other = Outcome(token_ids=tokens, logprobs=outcome.logprobs)
    assert reference.compare([prompt], [other])[0].wrong_tokens >= 1


@pytest.mark.slow
def test_perplexity_is_that_of_transformers(reference: Reference) -> None:
    tokenizer = load_tokenizer(str(DEMO))
    texts = [tokenizer.encode(text) for text in ("The mayor of Larkmoor is", "1, 2, 3, 4")]
    with Engine(str(DEMO)) as engine:
        found = perplexity(engine, texts)
    assert found == pytest.approx(reference.perplexity(texts), rel=1e-4)
    losses = [
        -float(reference.logprobs(text)[at - 1, text[at]])
        for text in texts
        for at in range(1, len(text))
    ]
    assert found == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-4)


def test_prompts_are_43_and_three_of_them_are_long() -> None:
    prompts = make_prompts(load_tokenizer(str(DEMO)))
    assert len(prompts) == len({tuple(prompt) for prompt in prompts}) == 43
    assert sum(len(prompt) >= LONG_TOKENS for prompt in prompts) == 3


def test_schemas_are_valid_bounded_and_judged() -> None:
    made = schemas(50, seed=0)
    assert len({json.dumps(schema) for schema in made}) == 50
    for schema in made:
        jsonschema.Draft202012Validator.check_schema(schema)
    schema = {"type": "object", "properties": {"day": {"type": "string", "format": "date"}}}
    assert not _schema_fault(schema, '{"day": "2026-02-28"}')
    for wrong in ('{"day": "2026-02-30"}', '{"day": 1}', '{"day": "2026-02-28"'):
        assert _schema_fault(schema, wrong)


def test_options_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--parts"):
        RealModelOptions(model=str(DEMO), parts=("everything",))
    with pytest.raises(ValueError, match="make check-real"):
        RealModelOptions(model=str(tmp_path), embedding_model=str(DEMO))
    with pytest.raises(ValueError, match="make check-real"):
        RealModelOptions(model=str(DEMO), embedding_model=str(tmp_path))


def test_wrong_vectors_and_wrong_neighbours_are_found() -> None:
    def failing(vectors: torch.Tensor) -> set[str]:
        return {check.name for check in judge_vectors(vectors, right) if not check.holds}

    size = 2 * len(PAIRS)
    right = torch.eye(len(PAIRS)).repeat(2, 1)
    assert len(make_texts()) > size
    assert failing(right) == failing(3 * right) == set()
    turned = right.clone()
    turned[-1, 0] = 0.01
    assert failing(turned) == {"embeddings_cosine"}
    swapped = torch.cat([right[: len(PAIRS)].roll(1, dims=0), right[len(PAIRS) :]])
    assert failing(swapped) == {"embeddings_cosine", "embeddings_answered"}


def test_logprobs_are_normalized(reference: Reference) -> None:
    assert torch.allclose(reference.logprobs([5, 6, 7]).exp().sum(-1), torch.ones(3))
