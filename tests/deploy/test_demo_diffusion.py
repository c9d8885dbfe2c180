"""The committed block-diffusion checkpoint: format, accuracy, rounds per block."""

from __future__ import annotations

import json

import pytest

from deploy.models.corpus import heldout_questions, read_questions
from deploy.models.evaluate_diffusion import FamilyResult, evaluate
from tests.support.effort import IS_LONG, cases
from tests.support.paths import MODELS

DEMO = MODELS / "demo-diffusion"


@pytest.fixture(scope="module")
def results() -> dict[str, FamilyResult]:
    questions = read_questions(MODELS / "demo_heldout.jsonl")
    return evaluate(DEMO, questions[:: len(questions) // cases(len(questions))])


def test_format_and_questions() -> None:
    config = json.loads((DEMO / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("sdar", ["SDARForCausalLM"])
    assert config["block_size"] == 16
    assert config["mask_token_id"] == config["vocab_size"] - 1
    assert read_questions(MODELS / "demo_heldout.jsonl") == heldout_questions()
    assert (DEMO / "model.safetensors").stat().st_size <= 6_000_000


def test_it_answers_most_heldout_questions(results: dict[str, FamilyResult]) -> None:
    assert len(results["overall"].right) == cases(200)
    assert results["overall"].accuracy >= (0.7 if IS_LONG else 0.6)


def test_rounds_vary_with_difficulty(results: dict[str, FamilyResult]) -> None:
    pace = {family: result.tokens_per_round for family, result in results.items()}
    assert pace["overall"] > 1.5
    assert max(pace.values()) > 1.5 * min(pace.values())
