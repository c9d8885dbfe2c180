"""Logits and greedy tokens equal transformers' for any division into steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.support.checkpoints.dense import SPECS, VOCAB_SIZE, write_checkpoint
from tests.support.engines.plan_driver import Request, generate, make_runner
from worker.rank.runner import ModelRunner

PROMPT_LENGTHS = (3, 8, 33, 150, 700)
NEAR_TIE = 1e-4
NATIVE = [name for name in SPECS if name not in ("llama-tied", "granite")]
"""Not supported by the compiled library: small heads, and multipliers."""


@pytest.fixture(
    scope="module",
    params=[*((name, "auto") for name in SPECS), ("llama", "torch"), ("qwen3", "torch")],
)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[PreTrainedModel, ModelRunner]:
    name, cpu_backend = request.param
    folder = tmp_path_factory.mktemp(name)
    torch.set_num_threads(1)
    model = write_checkpoint(name, Path(folder))
    runner = make_runner(str(folder), cpu_backend=cpu_backend)
    assert (runner.model.native is not None) == (cpu_backend == "auto" and name in NATIVE)
    return model, runner


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, VOCAB_SIZE, length).tolist() for length in PROMPT_LENGTHS]


def assert_equals_transformers(model: PreTrainedModel, request: Request) -> None:
    with torch.inference_mode():
        sequence = torch.tensor([request.prompt + request.tokens[:-1]])
        expected = model(sequence).logits[0, len(request.prompt) - 1 :]
    actual = torch.stack(request.logits)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)
    best, second = expected.topk(2, dim=-1).values.unbind(-1)
    for token, row, gap in zip(request.tokens, expected, best - second, strict=True):
        assert token == row.argmax() or gap < NEAR_TIE


def test_alone(pair: tuple[PreTrainedModel, ModelRunner]) -> None:
    model, runner = pair
    for prompt in prompts():
        request = Request(prompt=prompt)
        generate(runner, [request])
        assert_equals_transformers(model, request)


def test_chunked_prefill(pair: tuple[PreTrainedModel, ModelRunner]) -> None:
    model, runner = pair
    for prompt in prompts():
        request = Request(prompt=prompt, slot=5)
        generate(runner, [request], chunk=32, page_seed=1)
        assert_equals_transformers(model, request)


@pytest.mark.checks("native", of=NATIVE, against="transformers")
def test_mixed_batches(pair: tuple[PreTrainedModel, ModelRunner]) -> None:
    model, runner = pair
    requests = [
        Request(prompt=prompt, slot=7 - index, arrival=3 * index, new_tokens=6)
        for index, prompt in enumerate(prompts())
    ]
    generate(runner, requests, chunk=96, page_seed=2)
    for request in requests:
        assert_equals_transformers(model, request)


def test_cached_prefix(pair: tuple[PreTrainedModel, ModelRunner]) -> None:
    model, runner = pair
    owner = Request(prompt=prompts()[3])
    extended = Request(prompt=[*owner.prompt, 1, 2, 3], slot=1, arrival=3, prefix_of=owner)
    same = Request(prompt=owner.prompt, slot=2, arrival=3, prefix_of=owner)
    generate(runner, [owner, extended, same])
    for request in (owner, extended, same):
        assert_equals_transformers(model, request)
