"""The engine on CUDA: transformers' tokens in fp32, batch invariance, ranks that share a device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.checkpoints.dense import write_checkpoint
from tests.support.engines.engine_driver import Engine
from tests.support.engines.exactness import (
    ARCHITECTURES,
    GREEDY,
    Checkpoint,
    Settings,
    assert_greedy_of_transformers,
    make_prompts,
    seeded_params,
)
from worker.config import EngineConfig
from worker.models.layers.tensor_parallel import TensorParallelGroup
from worker.plan.plan import Admit, LogitsParams, PageWrite, Plan, PlannedRow
from worker.rank.rank import select_device
from worker.rank.runner import ModelRunner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    folder = tmp_path_factory.mktemp(request.param)
    model = write_checkpoint(request.param, Path(folder))
    return Checkpoint(request.param, str(folder), model)


@pytest.mark.parametrize("setting", ["alone", "batched", "chunked", "scarce", "tensor_parallel"])
def test_greedy_equals_transformers(checkpoint: Checkpoint, setting: str) -> None:
    settings = Settings(checkpoint.folder, [GREEDY] * 20, device="cuda", dtype="float32")
    if setting == "batched":
        results = list(settings.batched_then_cached())
    else:
        results = [getattr(settings, setting)()]
    for outputs in results:
        assert_greedy_of_transformers(checkpoint.model, make_prompts(), outputs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_batch_invariant_outputs_are_bitwise_equal(checkpoint: Checkpoint, dtype: str) -> None:
    settings = Settings(
        checkpoint.folder, seeded_params(), device="cuda", dtype=dtype, batch_invariant=True
    )
    alone = settings.alone()
    batched, cached = settings.batched_then_cached()
    assert batched == alone
    assert cached == alone
    assert settings.chunked() == alone
    assert settings.scarce() == alone
    together, alone_parallel = settings.tensor_parallel_and_alone()
    assert together == alone_parallel


def test_the_cache_is_sized_from_memory_and_given_back(checkpoint: Checkpoint) -> None:
    free_before = torch.cuda.mem_get_info()[0]
    for size in (1, 2):
        with Engine(
            checkpoint.folder,
            device="cuda",
            dtype="float32",
            tensor_parallel_size=size,
            gpu_memory_utilization=0.5,
        ) as engine:
            # The rest of the device's memory caches prefixes.
            assert engine.core.info.max_total_tokens > 32 * 1024
            outputs = engine.generate(make_prompts()[:4], GREEDY)
            assert all(len(output) == GREEDY.max_tokens for output in outputs)
    # Contexts and libraries remain; the cache and the weights do not.
    assert torch.cuda.memory_reserved() < 256 << 20
    assert free_before - torch.cuda.mem_get_info()[0] < 4 << 30


def test_a_step_waits_for_the_device_only_for_its_tokens(checkpoint: Checkpoint) -> None:
    config = EngineConfig.of(
        model=checkpoint.folder, device="cuda", max_num_seqs=4, kv_cache_tokens=1024
    )
    runner = ModelRunner(config, TensorParallelGroup.alone(select_device(config, 0)))
    runner.allocate(runner.hello().num_pages)
    tokens = bytes(4 * 9)
    rules = LogitsParams(
        9,
        presence_penalty=1.0,
        repetition_penalty=1.2,
        bias_token_ids=[3],
        biases=[1.0],
        bad_words=[[5], [6, 7]],
        min_tokens=3,
        stop_token_ids=[2],
        num_logprobs=2,
    )
    admits = [
        Admit(0, tokens, 0.0, 0, 1.0, 0.0, 0),
        Admit(1, tokens, 0.8, 20, 0.9, 0.05, 7),
        Admit(2, tokens, 0.9, 0, 1.0, 0.0, 8, rules),
    ]
    writes = [PageWrite(slot, 0, [slot + 1]) for slot in (0, 1, 2)]
    plans = [
        Plan(
            1,
            admits,
            writes,
            [PlannedRow(0, 0, 1, 0), PlannedRow(1, 0, 9, 1), PlannedRow(2, 0, 9, 1)],
        ),
        Plan(
            2,
            [],
            [],
            [PlannedRow(0, 1, 1, 1), PlannedRow(1, 9, 1, 1), PlannedRow(2, 9, 1, 1)],
        ),
    ]
    for plan in plans:
        runner.execute(plan)  # compiles
    with torch.inference_mode():
        for plan in plans:
            torch.cuda.set_sync_debug_mode("error")
            try:
                batch = runner._builder.build(plan)
                assert batch is not None
                drawn = runner.sample_batch(runner.run_model(batch), batch)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert drawn is not None
            assert batch.sampling is not None
            assert len(drawn.tokens.tolist()) == batch.sampling.num_samples
