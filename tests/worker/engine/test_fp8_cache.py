"""FP8 KV caches: bitwise equal outputs whatever the engine does, over numbers rounded to e4m3."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints.families import write_specimen
from tests.support.engines.engine_driver import Engine
from tests.support.engines.exactness import SCARCE_TOKENS, Settings, make_prompts, seeded_params
from tests.support.engines.plan_driver import Request, generate, make_runner

PARAMS = seeded_params()[:10]


def settings_of(folder: str, number: int = len(PARAMS), **options: Any) -> Settings:
    return Settings(folder, PARAMS[:number], batch_invariant=True, kv_cache_dtype="fp8", **options)


def test_outputs_are_bitwise_equal(folder: str) -> None:
    """With prefix hits; and in chunks, after preemptions, with pages from host memory."""
    batched, cached = settings_of(folder).batched_then_cached()
    assert cached == batched
    with Engine(
        folder,
        kv_cache_dtype="fp8_e4m3",
        kv_cache_tokens=SCARCE_TOKENS,
        max_num_batched_tokens=128,
        batch_invariant=True,
        host_cache_gib=0.01,
        host_cache_policy="always",
    ) as engine:
        assert engine.outcomes(make_prompts(len(PARAMS)), PARAMS) == batched
        totals = engine.core.scheduler.take_report().load.host_cache
        assert totals is not None
        assert totals.num_loaded > 0
        assert engine.num_preemptions > 0


def test_two_ranks(folder: str) -> None:
    """Prefix hits are bitwise equal to cold runs, and tokens are those of one rank."""
    batched, cached = settings_of(folder, 3, tensor_parallel_size=2).batched_then_cached()
    assert cached == batched
    alone, _ = settings_of(folder, 3).batched_then_cached()
    assert [one.token_ids for one in batched] == [one.token_ids for one in alone]


def logits_of(folder: Path, **options: Any) -> torch.Tensor:
    requests = [Request(prompt=list(range(5, 45))), Request(prompt=[7, 3, 9], slot=1)]
    generate(make_runner(str(folder), **options), requests, chunk=16)
    return torch.stack([row for request in requests for row in request.logits])


@pytest.mark.parametrize(
    "name", ["deepseek-v3", "gpt-oss", pytest.param("glm-5", marks=pytest.mark.long)]
)
def test_layers_read_numbers_of_e4m3(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Latents (all, or those selected by index keys, which are not rounded) and windows with sinks:
    equal to a float32 cache of rounded numbers."""

    def write_rounded(
        cells: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, scale: float
    ) -> None:
        assert scale == 1.0
        cells.index_copy_(0, slots, rows.to(torch.float8_e4m3fn).to(cells.dtype))

    torch.set_num_threads(1)
    write_specimen(name, tmp_path)
    own = logits_of(tmp_path, dtype="float32", kv_cache_dtype="fp8")
    plain = {"dtype": "float32", "attention_backend": "torch"}
    assert not torch.equal(own, logits_of(tmp_path, **plain))
    for module in ("kernels.prepare_latents", "kernels.qk_norm_rope_store.reference"):
        monkeypatch.setattr(import_module(module), "write_cells", write_rounded)
    assert torch.equal(own, logits_of(tmp_path, **plain))


def test_pages_are_half_of_those_in_bfloat16(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.rank.memory._available_cpu_bytes", lambda: 16 << 20)
    pages = []
    for options in ({"attention_backend": "torch"}, {"kv_cache_dtype": "fp8"}):
        runner = make_runner(folder, dtype="bfloat16", kv_cache_tokens=None, **options)
        pages.append(runner.hello().num_pages)
        assert len(next(iter(runner._kv_caches.values())).k) == pages[-1]
    assert pages[1] in (2 * pages[0], 2 * pages[0] + 1)
