"""After start-up no kernel is compiled any more, whatever is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from kernels.attention import triton_schedule
from tests.support.cuda.warm_starts import (
    DRAFTS,
    PLAIN_KINDS,
    new_variants,
    write_demo,
    write_model,
)
from tests.support.engines.block_engine import BlockEngine
from worker.rank import warmup
from worker.rank.sampling.state import FILTERS, SamplingState

EXPERTS = "Qwen/Qwen3-30B-A3B"
LAYERS = {
    "meta-llama/Llama-3.1-8B-Instruct": 1,
    "google/gemma-2-2b-it": 2,
    "google/gemma-3-1b-it": 6,
    "google/gemma-4-26B-A4B": 7,
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": 5,
    "deepseek-ai/DeepSeek-V2-Lite-Chat": 3,
    "deepseek-ai/DeepSeek-V3": 5,
    "openai/gpt-oss-20b": 3,
    "MiniMaxAI/MiniMax-M2.5": 2,
    "Qwen/Qwen3-30B-A3B-FP8": 2,
    "Qwen/Qwen3-8B-AWQ": 1,
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8": 1,
}
"""So that each kind of a model's layers is among them, and before the last, which computes no more
tokens than are read."""


@pytest.fixture
def experts(tmp_path: Path) -> str:
    return write_model(EXPERTS, tmp_path, 2)


def test_no_request_needs_another_binary(experts: str) -> None:
    assert new_variants(experts) == []


@pytest.mark.long
@pytest.mark.parametrize("model", list(LAYERS))
def test_no_request_to_other_models_needs_another_binary(model: str, tmp_path: Path) -> None:
    assert new_variants(write_model(model, tmp_path, LAYERS[model])) == []


OTHER_OPTIONS: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "batch-invariant": {"batch_invariant": True},
    "fp32": {"dtype": "float32"},
    "one request": {"max_num_seqs": 1, "cudagraph_capture_sizes": ()},
    "short": {"max_model_len": 100, "max_num_batched_tokens": 64},
    "small cache": {"kv_cache_tokens": 999, "page_size": 1, "max_model_len": 990},
}


@pytest.mark.long
@pytest.mark.parametrize("name", list(OTHER_OPTIONS))
def test_no_option_needs_another_binary(experts: str, name: str) -> None:
    assert new_variants(experts, **OTHER_OPTIONS[name]) == []


@pytest.mark.long
@pytest.mark.parametrize("num_drafts", [1, 20])
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("method", ["ngram", "draft"])
def test_no_draft_and_no_grammar_needs_another_binary(
    method: str, eager: bool, num_drafts: int, tmp_path: Path
) -> None:
    options = {
        "speculative_method": method,
        "num_speculative_tokens": num_drafts,
        "enforce_eager": eager,
        "max_model_len": 2048,
        **({"speculative_model": "deploy/models/demo-draft"} if method == "draft" else {}),
    }
    folder = write_demo("deploy/models/demo", tmp_path)
    assert new_variants(folder, grammars=True, **DRAFTS, **options) == []


@pytest.mark.long
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_no_block_needs_another_binary(eager: bool, tmp_path: Path) -> None:
    own = {"kinds": PLAIN_KINDS, "engine": BlockEngine}
    options = {"enforce_eager": eager, "max_model_len": 512, **own}
    assert new_variants(write_demo("deploy/models/demo-diffusion", tmp_path), **options) == []


# Sabotages: each has to be found.


def leave_out(kind: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Has start-up run no step of requests of a kind."""

    def sabotage(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(warmup, kind, warmup._GREEDY)

    return sabotage


def leave_out_large_steps(patch: pytest.MonkeyPatch) -> None:
    doubling = warmup._doubling

    def few(least: int, most: int) -> Iterator[int]:
        return doubling(least, min(most, 256))

    patch.setattr(warmup, "_doubling", few)


def filter_by_what_is_asked(patch: pytest.MonkeyPatch) -> None:
    def filters(state: SamplingState, slots: Any) -> tuple[str, ...]:
        used = (state.top_k[slots] > 0, state.top_p[slots] < 1.0, state.log_min_p[slots] > -99)
        return tuple(name for name, one in zip(FILTERS, used, strict=True) if one.any())

    patch.setattr(SamplingState, "filters", filters)


def specialize_on_numbers(patch: pytest.MonkeyPatch) -> None:
    kernel = triton_schedule._schedule_kernel
    for parameter in kernel.params:
        patch.setitem(parameter.__dict__, "do_not_specialize", False)
    patch.setattr(kernel, "device_caches", type(kernel.device_caches)(kernel.create_binder))


SABOTAGES: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "filters": ("_histogram_kernel", leave_out("_FILTERED")),
    "processors": ("_penalty_kernel", leave_out("_PROCESSED")),
    "large steps": ("_multiply_kernel", leave_out_large_steps),
    "each filter": ("_histogram_kernel", filter_by_what_is_asked),
    "numbers": ("_schedule_kernel", specialize_on_numbers),
}


@pytest.mark.long
@pytest.mark.parametrize("name", list(SABOTAGES))
def test_what_start_up_leaves_out_is_found(
    experts: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, sabotage = SABOTAGES[name]
    sabotage(monkeypatch)
    found = new_variants(experts, enforce_eager=True)
    assert any(one.startswith(kernel) for one in found), found
