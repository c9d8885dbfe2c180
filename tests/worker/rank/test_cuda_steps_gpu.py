"""Steps on CUDA: asynchronous launches, graphs that sample the same as eager steps,
synchronisation."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from deploy.benchmarks.engine import BenchEngine, decode_tokens
from deploy.benchmarks.kernels.shapes import write_shape
from tests.support.checkpoints.dense import VOCAB_SIZE, write_checkpoint
from tests.support.engines.decode_plans import (
    GRAPH_SIZES,
    OPTIONS,
    TOKEN_SIZES,
    assert_same,
    assert_same_state,
    run_plans,
    run_plans_ahead,
)
from tests.support.engines.engine_driver import Engine, Outcome
from tests.support.engines.exactness import SCARCE_TOKENS, make_prompts
from tests.support.engines.plan_driver import make_runner
from worker.config import EngineConfig
from worker.models.layers.tensor_parallel import TensorParallelGroup
from worker.plan.plan import Admit, PageWrite, Plan, PlannedRow
from worker.protocol.sampling import SamplingParams
from worker.rank.batch import Batch
from worker.rank.graphs import StepGraphs
from worker.rank.rank import select_device
from worker.rank.runner import ModelRunner
from worker.rank.transfer import StagedArrays

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CYCLES = 200_000_000
"""At least a tenth of a second of GPU time."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("qwen3")
    write_checkpoint("qwen3", Path(folder))
    return str(folder)


def cuda_runner(folder: str, **options: object) -> ModelRunner:
    group = TensorParallelGroup.alone(select_device(EngineConfig(model=folder, device="cuda"), 0))
    return make_runner(folder, group, device="cuda", **options)


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["plain", "batch-invariant"])
@pytest.mark.parametrize("sizes", [GRAPH_SIZES, (*GRAPH_SIZES, *TOKEN_SIZES)])
def test_graphs_draw_what_eager_steps_draw(
    folder: str, sizes: tuple[int, ...], batch_invariant: bool
) -> None:
    """Steps with prompts, too, where these are no longer than what is captured."""
    options = {**OPTIONS, "dtype": "float32", "batch_invariant": batch_invariant}
    eager = cuda_runner(folder, enforce_eager=True, **options)
    graphs = cuda_runner(folder, cudagraph_capture_sizes=sizes, **options)
    assert eager._graphs is None
    assert graphs._graphs is not None
    assert_same(run_plans(graphs), run_plans(eager))
    assert_same_state(graphs, eager, 0.0 if batch_invariant else 1e-4)


def test_plans_launched_ahead_draw_what_awaited_ones_draw(folder: str) -> None:
    options = {**OPTIONS, "dtype": "float32", "cudagraph_capture_sizes": GRAPH_SIZES}
    awaited, ahead = cuda_runner(folder, **options), cuda_runner(folder, **options)
    expected = run_plans(awaited)
    results = run_plans_ahead(ahead)
    assert_same(results, expected)
    for result, following in itertools.pairwise(results):
        assert result.times is not None
        assert following.times is not None
        times = [*result.times.__struct_fields__]
        moments = [getattr(result.times, name) for name in times]
        assert moments == sorted(moments)
        assert following.times.started >= result.times.finished - 1e-4


def long_plans() -> list[Plan]:
    tokens = np.arange(9, dtype="<i4").tobytes()
    admits = [Admit(0, tokens, 0.0, 0, 1.0, 0.0, 0), Admit(1, tokens, 0.8, 20, 0.9, 0.05, 7)]
    writes = [PageWrite(slot, 0, [2 * slot + 1, 2 * slot + 2]) for slot in (0, 1)]
    return [
        Plan(1, admits, writes, [PlannedRow(0, 0, 9, 1), PlannedRow(1, 0, 9, 1)]),
        *(
            Plan(n, [], [], [PlannedRow(0, 7 + n, 1, 1), PlannedRow(1, 7 + n, 1, 1)])
            for n in range(2, 6)
        ),
    ]


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_a_launch_does_not_wait_for_the_device(folder: str, enforce_eager: bool) -> None:
    runner = cuda_runner(folder, **OPTIONS, enforce_eager=enforce_eager)
    for plan in long_plans():
        runner.execute(plan)  # compiles
    assert runner._streams is not None
    steps = []
    for plan in long_plans()[:2]:
        with torch.cuda.stream(runner._streams.compute):
            torch.cuda._sleep(CYCLES)
        torch.cuda.set_sync_debug_mode("error")
        try:
            steps.append(runner.sample(runner.forward(plan)))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert not any(step.slot._completed.query() for step in steps if step.slot is not None)
    started = time.process_time()
    assert [len(step.result().token_ids) for step in steps] == [2, 2]
    assert time.process_time() - started < 0.05, "the host spun while it waited"


def test_a_long_prompt_outgrows_the_staging_buffers(folder: str) -> None:
    runner = cuda_runner(folder, max_num_seqs=40, kv_cache_tokens=64 * 1024, page_size=16)
    prompts = [[*np.random.default_rng(slot).integers(0, VOCAB_SIZE, 900)] for slot in range(40)]
    admits = [
        Admit(slot, np.asarray(prompt, dtype="<i4").tobytes(), 0.0, 0, 1.0, 0.0, 0)
        for slot, prompt in enumerate(prompts)
    ]
    writes = [PageWrite(slot, 0, [*range(60 * slot + 1, 60 * slot + 61)]) for slot in range(40)]
    runner.execute(Plan(1, admits, writes, [PlannedRow(39, 0, 900, 1)]))
    pool = runner._tables.token_pool.cpu()
    assert all(pool[slot, :900].tolist() == prompt for slot, prompt in enumerate(prompts))


def mixed_params(count: int) -> list[SamplingParams]:
    kinds = [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 0.8, "frequency_penalty": 0.7, "logprobs": 2},
        {"temperature": 0.7, "top_k": 20, "stop_token_ids": [*range(0, VOCAB_SIZE, 40)]},
        {"temperature": 0.0, "repetition_penalty": 1.2, "min_tokens": 4, "bad_words": []},
    ]
    return [
        SamplingParams(seed=60 + i, max_tokens=40, ignore_eos=True, **kinds[i % len(kinds)])
        for i in range(count)
    ]


class PoisoningEngine(Engine):
    """Fills free memory with garbage after every step, while the next one may be running."""

    def after_step(self) -> None:
        cache, runner = self.core.scheduler.state.cache, self.runner
        streams = runner._streams
        assert streams is not None
        with torch.inference_mode():
            pages = torch.tensor(cache._pages.free, dtype=torch.int64, device=runner.device)
            slots = torch.tensor(cache._slots.free, dtype=torch.int64, device=runner.device)
            for layer in runner._kv_caches.values():
                for plane in layer.planes:
                    plane.index_fill_(0, pages, 1e4)
            runner._tables.token_pool.index_fill_(0, slots, 1)
        # Steps from now on may take over what was free, so they come after the garbage.
        streams.compute.wait_stream(torch.cuda.current_stream())


@pytest.fixture(scope="module")
def expected(folder: str) -> Iterator[list[Outcome]]:
    prompts = make_prompts()
    with Engine(folder, **invariant(), overlap_depth=0, enforce_eager=True) as engine:
        yield engine.outcomes(prompts, mixed_params(len(prompts)))


def invariant(**options: object) -> dict[str, object]:
    return {
        "device": "cuda",
        "dtype": "float32",
        "batch_invariant": True,
        "kv_cache_tokens": 16384,
        **options,
    }


@pytest.mark.parametrize("kv_cache_tokens", [16384, SCARCE_TOKENS], ids=["ample", "scarce"])
@pytest.mark.parametrize("depth", [0, 1])
def test_depth_and_poison_change_nothing(
    folder: str, expected: list[Outcome], depth: int, kv_cache_tokens: int
) -> None:
    options = invariant(overlap_depth=depth, kv_cache_tokens=kv_cache_tokens)
    prompts = make_prompts()
    with PoisoningEngine(folder, **options) as engine:
        assert engine.runner._graphs is not None
        outcomes = engine.outcomes(prompts, mixed_params(len(prompts)))
        if kv_cache_tokens == SCARCE_TOKENS:
            assert engine.num_preemptions > 0, "pages were not scarce"
    assert [one.token_ids for one in outcomes] == [one.token_ids for one in expected]
    assert [one.finish_reason for one in outcomes] == [one.finish_reason for one in expected]


@pytest.mark.parametrize("kv_cache_tokens", [16384, SCARCE_TOKENS], ids=["ample", "scarce"])
def test_steps_with_prompts_replay_graphs(
    folder: str, kv_cache_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with cached prefixes, and with few pages."""
    replayed: list[int] = []
    forward = StepGraphs._forward_ragged

    def noted(graphs: StepGraphs, batch: Batch, staged: StagedArrays) -> torch.Tensor:
        replayed.append(batch.num_tokens)
        return forward(graphs, batch, staged)

    monkeypatch.setattr(StepGraphs, "_forward_ragged", noted)
    prompts = make_prompts()
    params = mixed_params(len(prompts))
    options = {"device": "cuda", "dtype": "float32", "kv_cache_tokens": kv_cache_tokens}
    found = []
    for enforce_eager in (True, False):
        with Engine(folder, enforce_eager=enforce_eager, **options) as engine:
            twice = [engine.outcomes(prompts, params) for _ in range(2)]
        found.append([one.token_ids for outcomes in twice for one in outcomes])
        assert bool(replayed) != enforce_eager
    assert found[0] == found[1]


def test_two_ranks_on_one_device_run_eagerly_and_agree(folder: str) -> None:
    prompts = make_prompts()
    found = []
    for depth in (0, 1):
        options = invariant(overlap_depth=depth, tensor_parallel_size=2)
        with Engine(folder, **options) as engine:
            assert engine.runner._graphs is None
            outcomes = engine.outcomes(prompts, mixed_params(len(prompts)))
        found.append([one.token_ids for one in outcomes])
    assert found[0] == found[1]


def test_graphs_fit_the_memory_that_was_set_aside(folder: str) -> None:
    with Engine(folder, device="cuda", gpu_memory_utilization=0.5, max_num_seqs=64) as engine:
        capture = engine.runner._capture
        assert capture is not None
        assert 0 < capture.expected < 2 << 30
        free, total = torch.cuda.mem_get_info()
        assert total - free < 0.6 * total


@pytest.mark.parametrize("running", [1, 8, 32])
def test_the_device_idles_little_between_steps(tmp_path: Path, running: int) -> None:
    config = EngineConfig.of(
        model=write_shape("qwen3-0.6b", str(tmp_path)),
        device="cuda",
        load_format="dummy",
        max_num_seqs=32,
        overlap_depth=1,
    )
    with BenchEngine(config, request_tokens=decode_tokens(100, 64)) as engine:
        turns = [engine.decode(running, number, steps=100, input_len=64) for number in range(4)]
    del turns[0]
    best = min(turns, key=lambda turn: turn.idle_us)
    assert best.idle_us <= 100.0
    assert best.idle_us <= 0.03 * best.wall_us
    assert best.wall_us == pytest.approx(best.rank_us + best.phases_us["bubble"], rel=0.05)
