"""Division of one device's memory, with the numbers of a CUDA device."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from worker.config import EngineConfig
from worker.models.layers.kv_cache import KVCacheSpec, StatePlane, StateSpec, group_layers
from worker.models.layers.tensor_parallel import TensorParallelGroup
from worker.plan.plan import BlockRow
from worker.protocol.page_groups import ONE_GROUP
from worker.rank.kv_cache import page_bytes, page_groups
from worker.rank.memory import cache_share, plan_pages
from worker.rank.profiling import profile_plans
from worker.rank.sampling.logits_processors import penalizes

GB = 1 << 30


def test_one_rank_takes_what_its_step_and_others_leave() -> None:
    # 80 in all; 10 held by this rank and 4 by others; 13 at the peak of a step.
    assert cache_share(80 * GB, 66 * GB, 0.75, [(13 * GB, 10 * GB)]) == (60 - 4 - 13) * GB


def test_ranks_on_one_device_share_its_memory() -> None:
    ranks = [(13 * GB, 10 * GB), (12 * GB, 9 * GB)]
    free = (80 - 10 - 9 - 5) * GB
    share = cache_share(80 * GB, free, 0.75, ranks)
    assert 2 * share == (60 - 5 - 13 - 12) * GB


def test_a_full_device_has_no_room() -> None:
    assert cache_share(80 * GB, 1 * GB, 0.9, [(13 * GB, 10 * GB)]) < 0


def test_states_come_before_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.rank.memory._available_cpu_bytes", lambda: 10 * GB)
    plan = partial(
        plan_pages,
        EngineConfig.of(model="any", max_num_seqs=64, page_size=16),
        group=TensorParallelGroup.alone(torch.device("cpu")),
        page_bytes=1 << 20,
        page_groups=ONE_GROUP,
        max_model_len=1 << 20,
        profile=lambda: None,
        graphs=lambda: 0,
    )
    assert plan() == 1024
    assert plan(state_bytes=GB // 2) == 512
    with pytest.raises(ValueError, match=r"no room for a KV cache.*--max-num-seqs"):
        plan(state_bytes=GB)


def pages_on_gpu(monkeypatch: pytest.MonkeyPatch, **options: Any) -> int:
    """Pages of 1 MiB, four per request of full length, with 60 GiB available."""
    monkeypatch.setattr("worker.rank.memory._cuda_cache_bytes", lambda *_: 60 * GB)
    return plan_pages(
        EngineConfig.of(
            model="any", max_num_seqs=3, page_size=16, max_num_batched_tokens=64, **options
        ),
        group=TensorParallelGroup.alone(torch.device("cuda")),
        page_bytes=1 << 20,
        page_groups=ONE_GROUP,
        max_model_len=64,
        profile=lambda: None,
        graphs=lambda: 0,
    )


def test_all_memory_of_a_gpu_keeps_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pages_on_gpu(monkeypatch) == 60 * 1024
    assert pages_on_gpu(monkeypatch, enable_prefix_caching=False) == 3 * 4 + 1


def test_what_the_largest_step_takes_at_its_peak_is_left_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With graphs: 60 of 80 may be used, other processes use 4, and this rank 10 between steps."""
    profiled: list[bool] = []
    for name, value in {
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda _: None,
        "synchronize": lambda _: None,
        "max_memory_allocated": lambda _: 13 * GB if profiled else 0,
        "memory_reserved": lambda _: 10 * GB,
        "mem_get_info": lambda _: (66 * GB, 80 * GB),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    pages = plan_pages(
        EngineConfig.of(model="any", page_size=16, gpu_memory_utilization=0.75),
        group=TensorParallelGroup.alone(torch.device("cuda")),
        page_bytes=GB,
        page_groups=ONE_GROUP,
        max_model_len=64,
        profile=lambda: profiled.append(True),
        graphs=lambda: 2 * GB,
    )
    assert pages == 60 - 4 - 13 - 2


def test_half_of_what_pages_take_is_snapshots() -> None:
    state = StateSpec(
        planes=(StatePlane((3, 80), torch.bfloat16), StatePlane((4, 32, 64), torch.float32))
    )
    spec = KVCacheSpec(num_kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    layout = group_layers([None, spec], [state, None])
    config = EngineConfig.of(model="any", page_size=16)
    groups = page_groups(config, layout)
    num_bytes = page_bytes(config, layout, groups)
    assert groups.snapshot_pages == 5
    snapshots = groups.num_snapshots(1000) * layout.state_bytes
    assert 1000 * num_bytes >= 1000 * layout.page_bytes(16) + snapshots
    assert 0.8 < snapshots / (1000 * layout.page_bytes(16)) <= 1
    none = EngineConfig.of(model="any", page_size=16, enable_prefix_caching=False)
    assert page_groups(none, layout).snapshot_pages == 0
    assert page_bytes(none, layout, page_groups(none, layout)) == layout.page_bytes(16)


@pytest.mark.parametrize("block_size", [1, 4])
def test_the_largest_draw_has_all_that_takes_memory_later(block_size: int) -> None:
    """Tables of processors are allocated for the first request that needs them; planning includes
    them."""
    config = EngineConfig.of(
        model="none", max_num_seqs=3, page_size=16, max_num_batched_tokens=1024
    )
    prefill, draw = profile_plans(config, max_model_len=64, block_size=block_size).plans
    assert [admit.slot for admit in draw.admits] == [0, 1, 2]
    for admit in draw.admits:
        params = admit.logits_params
        assert params is not None
        assert penalizes(params)
        assert params.allowed_token_ids
        assert params.biases
        assert params.num_logprobs >= 0
    assert all(admit.logits_params is None for admit in prefill.admits)
    prefill, short, _ = profile_plans(config, max_model_len=64, block_size=1, short_row=20).plans
    assert [row.length for row in prefill.rows] == [63] * 3
    assert [row.length for row in short.rows] == [20] * 3


def test_the_largest_steps_of_canvases() -> None:
    """Of known tokens, which sample nothing, of as many canvases as a step has tokens for, and of
    both."""
    config = EngineConfig.of(model="none", max_num_seqs=9, max_num_batched_tokens=100)
    profiled = profile_plans(config, max_model_len=64, block_size=1, canvas_length=16)
    known, canvases, mixed = profiled.plans
    assert [(row.length, row.num_samples) for row in known.rows] == [(63, 0)] * 2
    assert [row.length for row in canvases.rows] == [16] * 6
    assert [row.length for row in mixed.rows] == [32] * 3
    assert all(isinstance(row, BlockRow) for row in (*canvases.rows, *mixed.rows))
