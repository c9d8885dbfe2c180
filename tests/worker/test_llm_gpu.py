"""Offline use on CUDA: one rank, and two that share one device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from worker.llm import LLM, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = ["one", "a prompt of a few words", "x" * 300]


def complete(model: Path, **options: object) -> list[list[int]]:
    with LLM(str(model), kv_cache_tokens=4096, **options) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
        return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("size", [1, 2])
def test_fp32_tokens_equal_the_cpu_s(tiny_chat_model: Path, size: int) -> None:
    expected = complete(tiny_chat_model, device="cpu", cpu_threads=1)
    actual = complete(tiny_chat_model, device="cuda", dtype="float32", tensor_parallel_size=size)
    assert actual == expected


@pytest.mark.parametrize("size", [1, 2])
def test_defaults_take_cuda_and_bf16(tiny_chat_model: Path, size: int) -> None:
    outputs = complete(tiny_chat_model, tensor_parallel_size=size)
    assert [len(tokens) for tokens in outputs] == [24] * len(PROMPTS)


def test_a_seed_reproduces_tokens(tiny_chat_model: Path) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=3, max_tokens=32, ignore_eos=True)
    with LLM(str(tiny_chat_model), kv_cache_tokens=4096, batch_invariant=True) as llm:
        first = llm.generate(PROMPTS, params)
        again = llm.generate(PROMPTS[:1], params)
    assert again[0].outputs[0].token_ids == first[0].outputs[0].token_ids
