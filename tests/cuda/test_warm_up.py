"""After startup no kernel is compiled, for any request."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from kernels.attention import triton_kernel, triton_schedule
from tests.support.cuda.variants import noting_variants
from tests.support.cuda.warm_starts import (
    BLOCK_KINDS,
    DRAFTS,
    OPTIONS,
    new_variants,
    write_demo,
    write_model,
)
from tests.support.engines.adapter_engine import EmptySlotsEngine
from tests.support.engines.engine_driver import Engine
from worker.plan.plan import Plan
from worker.rank import warmup
from worker.rank.runner import ModelRunner
from worker.rank.sampling.state import FILTERS, SamplingState

EXPERTS = "Qwen/Qwen3-30B-A3B"
LATENTS = "zai-org/GLM-4.7-Flash"
"""Also has shared experts."""
SINKS = "openai/gpt-oss-20b"
"""Also has windows."""
STATES = "Qwen/Qwen3-Next-80B-A3B-Instruct"
SELECTED = "zai-org/GLM-5"
"""Has sparse attention."""
AWQ = "TheBloke/Llama-2-7B-AWQ"
CHANGED: dict[str, dict[str, Any]] = {
    STATES: {"full_attention_interval": 2},
    SELECTED: {"index_topk": 64, "indexer_types": ["full", "full", "full", "shared"]},
    AWQ: {"max_position_embeddings": 8192},
}
"""Changes so that few layers include both kinds, many queries select tokens, and prompts fit."""
SMALL_STEPS = {"max_num_batched_tokens": 128}
RANKS = {"tensor_parallel_size": 2}
WHOLE_EXPERTS = {**RANKS, "enable_expert_parallel": True}
LAYERS = {
    "meta-llama/Llama-3.1-8B-Instruct": 1,
    "google/gemma-2-2b-it": 2,
    "google/gemma-3-1b-it": 6,
    "google/gemma-4-26B-A4B": 7,
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": 5,
    "deepseek-ai/DeepSeek-V2-Lite-Chat": 3,
    "deepseek-ai/DeepSeek-V3": 5,
    LATENTS: 3,
    "mistralai/Mistral-Small-4-119B-2603": 2,
    "meituan-longcat/LongCat-Flash-Chat": 2,
    SINKS: 3,
    "allenai/Olmo-3-1025-7B": 4,
    "bigcode/starcoder2-7b": 2,
    "swiss-ai/Apertus-8B-Instruct-2509": 2,
    "MiniMaxAI/MiniMax-M2.5": 2,
    "zai-org/GLM-4.5-Air": 3,
    SELECTED: 4,
    "Qwen/Qwen1.5-MoE-A2.7B": 2,
    STATES: 3,
    "Qwen/Qwen3-30B-A3B-FP8": 2,
    AWQ: 2,
    "Qwen/Qwen3-32B-FP8-Static-PerTensor": 2,
}
"""Numbers of layers that include each kind of layer before the last one, which only computes tokens
whose logits are needed."""


def write(name: str, folder: Path, num_layers: int = 2) -> str:
    return write_model(name, folder, num_layers, **CHANGED.get(name, {}))


@pytest.fixture
def experts(tmp_path: Path) -> str:
    return write(EXPERTS, tmp_path)


def test_no_request_needs_another_binary(experts: str) -> None:
    assert new_variants(experts) == []


def test_where_kernels_are_kept_can_be_written(
    experts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any process of a rank; here in the scheduler's."""
    (tmp_path / "file").touch()
    monkeypatch.setenv(warmup.CACHE_VARIABLE, str(tmp_path / "file" / "triton"))
    with noting_variants(), Engine(experts, **OPTIONS):
        assert warmup.CACHE_VARIABLE not in os.environ


BRIEFLY = {"max_num_seqs": 10, "max_num_batched_tokens": 512}
"""Two rows more than the largest graph, and steps with more tokens than a prompt."""
BRIEF: dict[str, tuple[str, dict[str, Any]]] = {
    "ranks": (EXPERTS, {**BRIEFLY, **WHOLE_EXPERTS}),
    "latents": (LATENTS, BRIEFLY),
    "sinks": (SINKS, BRIEFLY),
    "caps": ("google/gemma-2-2b-it", BRIEFLY),
    "states": (STATES, {**BRIEFLY, **SMALL_STEPS}),
    "tokens": (EXPERTS, {**BRIEFLY, "cudagraph_capture_sizes": (1, 8, 64, 256)}),
}


@pytest.mark.parametrize("kind", list(BRIEF))
def test_no_kind_of_model_needs_another_binary(kind: str, tmp_path: Path) -> None:
    """A short run; the tests below serve more requests."""
    model, options = BRIEF[kind]
    assert new_variants(write(model, tmp_path), brief=True, **options) == []


@pytest.mark.long
@pytest.mark.parametrize("model", list(LAYERS))
def test_no_request_to_other_models_needs_another_binary(model: str, tmp_path: Path) -> None:
    assert new_variants(write(model, tmp_path, LAYERS[model])) == []


@pytest.mark.long
@pytest.mark.parametrize("model", ["Qwen/Qwen3.5-9B", "Qwen/Qwen3.5-35B-A3B"])
def test_no_request_to_models_with_states_needs_another_binary(model: str, tmp_path: Path) -> None:
    """On one or two ranks, and with drafts."""
    drafts = {"speculative_method": "ngram", **DRAFTS}
    for options in ({}, RANKS, drafts, {**drafts, "enforce_eager": True}):
        folder = write(model, tmp_path, 5)
        assert new_variants(folder, brief=True, **SMALL_STEPS, **options) == []


ON_RANKS: dict[str, dict[str, Any]] = {
    EXPERTS: RANKS,
    LATENTS: WHOLE_EXPERTS,
    "deepseek-ai/DeepSeek-V2-Lite-Chat": RANKS,
    "meituan-longcat/LongCat-Flash-Chat": WHOLE_EXPERTS,
    SINKS: WHOLE_EXPERTS,
    "google/gemma-3-1b-it": RANKS,
    "Qwen/Qwen1.5-MoE-A2.7B": WHOLE_EXPERTS,
    "Qwen/Qwen3-30B-A3B-FP8": RANKS,
    AWQ: RANKS,
}


@pytest.mark.long
@pytest.mark.parametrize("model", list(ON_RANKS))
def test_no_rank_needs_another_binary(model: str, tmp_path: Path) -> None:
    folder = write(model, tmp_path, LAYERS.get(model, 2))
    assert new_variants(folder, **ON_RANKS[model]) == []


@pytest.mark.long
@pytest.mark.parametrize("model", [EXPERTS, SINKS])
def test_none_of_eight_ranks_needs_another_binary(model: str, tmp_path: Path) -> None:
    """With four heads of keys, or eight."""
    options = {**WHOLE_EXPERTS, "tensor_parallel_size": 8}
    assert new_variants(write(model, tmp_path), brief=True, **options) == []


OTHER_OPTIONS: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "tokens": {"cudagraph_capture_sizes": (1, 8, 64, 512, 2048)},
    "batch-invariant": {"batch_invariant": True},
    "fp32": {"dtype": "float32"},
    "one request": {"max_num_seqs": 1, "cudagraph_capture_sizes": ()},
    "short": {"max_model_len": 100, "max_num_batched_tokens": 64},
    "small cache": {"kv_cache_tokens": 999, "page_size": 1, "max_model_len": 990},
}


@pytest.mark.long
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_no_adapter_needs_another_binary(experts: str, *, eager: bool) -> None:
    assert new_variants(experts, engine=EmptySlotsEngine, enforce_eager=eager) == []


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
def test_drafts_of_up_to_sixteen_tokens_share_a_binary(experts: str) -> None:
    own = {"speculative_method": "ngram", "num_speculative_tokens": 16}
    with noting_variants() as variants, Engine(experts, **OPTIONS, **DRAFTS, **own):
        kernels = [variant.kernel for variant in variants.sites]
    assert kernels.count("_draft_kernel") == 1


@pytest.mark.long
@pytest.mark.parametrize("method", ["ngram", "draft"])
def test_no_draft_of_ranks_needs_another_binary(method: str, tmp_path: Path) -> None:
    options = {
        "speculative_method": method,
        "max_model_len": 2048,
        **({"speculative_model": "deploy/models/demo-draft"} if method == "draft" else {}),
    }
    folder = write_demo("deploy/models/demo", tmp_path)
    assert new_variants(folder, grammars=True, **DRAFTS, **RANKS, **options) == []


@pytest.mark.long
@pytest.mark.parametrize("model", [LATENTS, SINKS, "google/gemma-2-2b-it"])
def test_no_draft_of_other_models_needs_another_binary(model: str, tmp_path: Path) -> None:
    folder = write(model, tmp_path, LAYERS[model])
    assert new_variants(folder, speculative_method="ngram", **DRAFTS) == []


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_no_block_needs_another_binary(eager: bool, num_ranks: int, tmp_path: Path) -> None:
    own = {"kinds": BLOCK_KINDS, "grammars": True, "tensor_parallel_size": num_ranks}
    options = {"enforce_eager": eager, "max_model_len": 512, **own}
    assert new_variants(write_demo("deploy/models/demo-diffusion", tmp_path), **options) == []


# Sabotages: each must be detected.


def leave_out(kind: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Omits warm-up steps of one kind of requests."""

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


def specialize_on_places(patch: pytest.MonkeyPatch) -> None:
    """Specializes kernels on the offsets of prompts in arrays, which come after rows of one
    token."""
    kernel = triton_kernel._attention_kernel
    for parameter in kernel.params:
        patch.setitem(parameter.__dict__, "do_not_specialize_on_alignment", False)
    patch.setattr(kernel, "device_caches", type(kernel.device_caches)(kernel.create_binder))


def leave_out_prompts(patch: pytest.MonkeyPatch) -> None:
    steps = warmup._steps

    def short(limits: warmup.WarmUpLimits) -> list[Plan]:
        return [plan for plan in steps(limits) if all(row.length == 1 for row in plan.rows)]

    patch.setattr(warmup, "_steps", short)


def leave_out_other_ranks(patch: pytest.MonkeyPatch) -> None:
    warm_up = ModelRunner._warm_up

    def of_first(runner: ModelRunner) -> None:
        if runner.group.rank == 0:
            warm_up(runner)

    patch.setattr(ModelRunner, "_warm_up", of_first)


SABOTAGES: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "filters": ("_histogram_kernel", leave_out("_FILTERED")),
    "processors": ("_penalty_kernel", leave_out("_PROCESSED")),
    "large steps": ("_multiply_kernel", leave_out_large_steps),
    "each filter": ("_histogram_kernel", filter_by_what_is_asked),
    "numbers": ("_schedule_kernel", specialize_on_numbers),
    "places": ("_attention_kernel", specialize_on_places),
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


BRIEF_SABOTAGES: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "ranks": ("_multiply_kernel of rank 1", leave_out_other_ranks),
    "latents": ("_latent_kernel", leave_out_prompts),
    "sinks": ("_attention_kernel", leave_out_prompts),
    "caps": ("_attention_kernel", leave_out_prompts),
    "states": ("_solve_kernel", leave_out_prompts),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", list(BRIEF_SABOTAGES))
def test_it_is_found_briefly(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, options = BRIEF[kind]
    kernel, sabotage = BRIEF_SABOTAGES[kind]
    sabotage(monkeypatch)
    # Graphs with rows of any lengths need the same as prompts.
    found = new_variants(write(model, tmp_path), brief=True, enforce_eager=True, **options)
    assert any(one.startswith(kernel) for one in found), found
