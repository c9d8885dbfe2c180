"""Rows with LoRA adapters have the bits of each request alone: in scarce pages, after preemptions,
with drafts, grammars and log-probabilities, and beside rows of the same prompt with others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints.adapters import write_adapter
from tests.support.checkpoints.chat import write_tiny_chat
from tests.support.checkpoints.mtp import write_with_head
from tests.support.engines.engine_driver import Engine, Outcome
from worker.core.adapter_folder import static_adapters
from worker.protocol.adapters import AdapterRef
from worker.protocol.blocks import cache_scope
from worker.protocol.sampling import SamplingParams
from worker.protocol.structured import StructuredOutputsParams

NUM_REQUESTS = 10
OPTIONS: dict[str, Any] = {
    "batch_invariant": True,
    "cpu_backend": "torch",
    "enable_lora": True,
    "enable_lora_embeddings": True,
    "max_loras": 2,
    "max_model_len": 256,
    "page_size": 8,
}
DRAFTS = {"speculative_adaptive": False, "num_speculative_tokens": 3}
SETTINGS: dict[str, dict[str, Any]] = {
    "scarce pages": {"kv_cache_tokens": 128, "max_num_batched_tokens": 48, "max_num_seqs": 12},
    "n-gram drafts": {"kv_cache_tokens": 448, "speculative_method": "ngram", **DRAFTS},
    "MTP head": {"kv_cache_tokens": 448, "speculative_method": "mtp", **DRAFTS},
}


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tmp_path_factory.mktemp("schedules")


def checkpoint(parent: Path, has_head: bool) -> tuple[Path, list[AdapterRef]]:
    """A checkpoint with an MTP head or a vocabulary of bytes, and three adapters of it."""
    base = parent / ("head" if has_head else "chat")
    if not base.exists():
        base.mkdir()
        if has_head:
            write_with_head("mimo", base)
        else:
            write_tiny_chat(base)
    names = ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj")  # not those of the head
    layers = [f"model.layers.{layer}.{name}" for layer in range(2) for name in names]
    targets = (*layers, "model.embed_tokens", "lm_head")
    folders = {
        str(n): str(
            write_adapter(base, parent / f"{base.name}-{n}", 2 + n, targets=targets, seed=n)
        )
        for n in range(3)
    }
    return base, static_adapters(folders, 16)


def sampling(number: int, has_head: bool) -> SamplingParams:
    """Greedy and sampled, with log-probabilities or a grammar."""
    kinds: tuple[dict[str, Any], ...] = (
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 0.9, "prompt_logprobs": 1},
        {"temperature": 1.1, "top_k": 20, "logprobs": 0},
        {"temperature": 0.0},
        {"temperature": 0.8}
        if has_head
        else {"structured_outputs": StructuredOutputsParams(regex="[a-f]{2,9}(yes|no)+")},
    )
    kind = kinds[number % len(kinds)]
    return SamplingParams(seed=number, max_tokens=16, ignore_eos=True, **kind)


def submit(
    engine: Engine, refs: list[AdapterRef], number: int, has_head: bool
) -> tuple[str, Outcome]:
    """A request; several adapters, and none, get the same prompt."""
    generator = torch.Generator().manual_seed(number % 3)
    prompt = torch.randint(8, 90, (20 + 9 * (number % 3),), generator=generator).tolist()
    ref = [*refs, None][number % 4]
    salt = "" if ref is None else cache_scope(adapter=ref.version)
    params = sampling(number, has_head)
    return engine.submit(prompt, params, adapter=ref, cache_salt=salt)


@pytest.mark.parametrize(
    "name", ["scarce pages", "MTP head", pytest.param("n-gram drafts", marks=pytest.mark.long)]
)
def test_requests_equal_each_alone(name: str, parent: Path) -> None:
    has_head = name == "MTP head"
    base, refs = checkpoint(parent, has_head)
    alone = []
    uncached = {"kv_cache_tokens": 2048, "enable_prefix_caching": False}
    with Engine(str(base), **uncached, **OPTIONS) as engine:
        for number in range(NUM_REQUESTS):
            outputs = dict([submit(engine, refs, number, has_head)])
            engine.drain(outputs)
            alone += outputs.values()
    assert len({tuple(outcome.token_ids) for outcome in alone}) > NUM_REQUESTS // 2
    with Engine(str(base), **OPTIONS, **SETTINGS[name]) as engine:
        for _ in range(2):  # then cached
            outputs = dict(submit(engine, refs, n, has_head) for n in range(NUM_REQUESTS))
            engine.drain(outputs)
            assert list(outputs.values()) == alone
        if name == "scarce pages":
            assert engine.num_preemptions > 0, "pages were not scarce"
        else:
            gate = engine.core.scheduler.steps.speculation
            assert gate is not None
            assert gate.totals.num_accepted_tokens > 0
