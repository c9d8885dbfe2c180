"""Steps of blocks launched before the result of the previous one is known change nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.checkpoints.sdar import MASK, VOCAB_SIZE, SdarCheckpoint, write_sdar
from tests.support.engines.block_engine import AheadEngine, BlockOutput, is_ahead
from tests.support.engines.invented_model import InventedEngine
from worker.protocol.diffusion import DiffusionParams
from worker.protocol.messages import Submit
from worker.protocol.sampling import SamplingParams

SIZE = 8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> SdarCheckpoint:
    torch.set_num_threads(1)
    return write_sdar(tmp_path_factory.mktemp("sdar"), SIZE)


def requests(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Both algorithms, greedy and sampled, some with mask tokens in their prompts."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, VOCAB_SIZE, int(rng.integers(1, 40))).tolist() for _ in range(count)]
    prompts[1][-1] = MASK
    params = [
        SamplingParams(
            seed=index,
            temperature=(0.0, 0.8)[index % 3 == 2],
            max_tokens=int(rng.integers(1, 40)),
            ignore_eos=bool(index % 2),
            stop_token_ids=(9, 20, 31),
            diffusion=DiffusionParams(
                algorithm=("LowConfidence", "JointThreshold")[index % 2],
                threshold=(0.3, 0.5)[index % 2],
                edit_threshold=0.6,
                max_post_edit_steps=2,
                stream_drafts=index == 5,
            ),
        )
        for index in range(count)
    ]
    return prompts, params


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_cache_tokens": 160},
        pytest.param({"dllm_fdfo": False}, marks=pytest.mark.long),
        pytest.param({"cpu_backend": "torch"}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_depth_changes_no_token_and_no_round(
    checkpoint: SdarCheckpoint, options: dict[str, object]
) -> None:
    settings: dict[str, object] = {"max_num_seqs": 12, "kv_cache_tokens": 2048, **options}
    found: list[list[BlockOutput]] = []
    forwards = []
    for depth in (0, 1):
        with AheadEngine(checkpoint.folder, overlap_depth=depth, **settings) as engine:
            found.append(engine.serve(*requests(12)))
            totals = engine.core.scheduler.take_report().load.blocks
            assert totals is not None
            forwards.append(totals.num_forwards)
            ahead = [plan for plan in engine.plans if is_ahead(plan)]
            assert bool(ahead) == bool(depth)
    plain, overlapped = found
    for one, other in zip(overlapped, plain, strict=True):
        assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
        assert sum(one.rounds) == sum(other.rounds)
    # All have a slot from the start, so not even the number of passes differs.
    if options != {"kv_cache_tokens": 160}:
        assert forwards[0] == forwards[1]


def test_a_step_ahead_of_requests_that_end_computes_nothing() -> None:
    engine = InventedEngine(8, flat=True, depth=1)
    sampling = SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True)
    engine.add("a", [5], sampling)
    while engine.scheduler.has_work():
        engine.step()
    assert (engine.num_forwards, engine.num_row_steps, engine.num_ahead) == (7, 7, 1)
    load = engine.scheduler.take_report().load
    assert load.blocks is not None
    assert (load.blocks.num_forwards, load.blocks.num_passes) == (7, 7)
    assert load.step_ms == 1.0 / 7


def test_who_waits_is_not_passed_over(checkpoint: SdarCheckpoint) -> None:
    """While a request waits for a slot, no step is launched before free slots are known, so the
    number of passes is that without overlap."""
    prompts, params = requests(9)
    forwards = []
    for depth in (0, 1):
        settings = {"overlap_depth": depth, "max_num_seqs": 3, "kv_cache_tokens": 2048}
        with AheadEngine(checkpoint.folder, **settings) as engine:
            engine.serve(prompts, params)
            totals = engine.core.scheduler.take_report().load.blocks
            assert totals is not None
            forwards.append(totals.num_forwards)
            if depth:
                admitting = [place for place, plan in enumerate(engine.plans) if plan.admits]
                first = next(p for p, plan in enumerate(engine.plans) if is_ahead(plan))
                assert first > admitting[-1]
    assert forwards[0] == forwards[1]


def test_the_next_step_leaves_before_a_result_is_reported(checkpoint: SdarCheckpoint) -> None:
    """It includes requests that arrived during the first step."""
    prompts, _ = requests(2)
    sampling = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)

    def submit(number: int) -> None:
        prompt = np.asarray(prompts[number], dtype="<i4").tobytes()
        engine.core.add(
            Submit(request_id=str(number), gateway_id="g", prompt=prompt, sampling=sampling)
        )

    settings = {"max_num_seqs": 2, "kv_cache_tokens": 2048, "dllm_disable": ("inplace",)}
    with AheadEngine(checkpoint.folder, **settings) as engine:
        submit(0)
        engine.core.step()
        assert len(engine.plans) == 1
        report = engine.core.step(lambda: submit(1))
        assert report.load.blocks is not None
        assert report.load.blocks.num_forwards == 1
        assert [len(plan.rows) for plan in engine.plans] == [1, 2]
        while engine.core.has_work():
            engine.core.step()
        assert not any(is_ahead(plan) for plan in engine.plans)


def test_all_ranks_put_speculative_rows_on_the_same_blocks(checkpoint: SdarCheckpoint) -> None:
    found = []
    for ranks in (1, 2):
        settings = {"tensor_parallel_size": ranks, "max_num_seqs": 6, "kv_cache_tokens": 2048}
        with AheadEngine(checkpoint.folder, **settings) as engine:
            found.append(engine.serve(*requests(4)))
            assert any(is_ahead(plan) for plan in engine.plans)
    for one, other in zip(*found, strict=True):
        assert (one.token_ids, one.rounds) == (other.token_ids, other.rounds)
