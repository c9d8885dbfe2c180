"""HTTP requests to a fleet with one worker whose two ranks hold whole experts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeForCausalLM

from tests.support.checkpoints.chat import write_tiny_experts
from tests.support.fleet.running_fleet import start_fleet, stop_fleet

if TYPE_CHECKING:
    from openai import OpenAI

NEAR_TIE = 1e-4
NUM_NEW = 24


@pytest.mark.long
def test_greedy_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    """First concurrent requests, so that batches are mixed, then one with a prefix hit."""
    model = write_tiny_experts(tmp_path / "experts")
    experts = ("--tensor-parallel-size", "2", "--enable-expert-parallel")
    options = ("--device", "cpu", "--dtype", "float32", "--kv-cache-tokens", "4096")
    fleet = start_fleet(tmp_path, str(tmp_path / "experts"), *experts, *options)
    try:
        fleet.wait_ready(num_workers=1)
        client = fleet.client
        (served,) = client.models.list()
        rng = np.random.default_rng(3)
        prompts = [rng.integers(0, 250, length).tolist() for length in (3, 20, 47, 110, 300)]
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(lambda one: complete(client, served.id, one), prompts))
        answers.append(complete(client, served.id, prompts[-1]))
        for prompt, tokens in zip([*prompts, prompts[-1]], answers, strict=True):
            check(model, prompt, tokens)
    finally:
        stop_fleet(fleet)


def complete(client: OpenAI, model: str, prompt: list[int]) -> list[int]:
    """Tokens generated after a prompt."""
    answer = client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=NUM_NEW,
        temperature=0,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    tokens = answer.choices[0].model_extra
    assert tokens is not None
    return list(tokens["token_ids"])


def check(model: Qwen3MoeForCausalLM, prompt: list[int], tokens: list[int]) -> None:
    """Checks that every token is the best after those before it, except for near ties."""
    assert len(tokens) == NUM_NEW
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert (logits.max(dim=-1).values - chosen < NEAR_TIE).all()
