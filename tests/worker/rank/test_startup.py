"""Phases of a worker's startup, as reported by the engine."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch

from tests.support.checkpoints.dense import write_checkpoint
from worker.config import EngineConfig
from worker.core.executor_local import LocalExecutor
from worker.core.info import slowest
from worker.models.layers.tensor_parallel import TensorParallelGroup
from worker.plan.messages import Hello, Ready, Start
from worker.rank.rank import Rank

PHASES = ["connect", "download", "load_weights", "profile"]


def test_each_phase_is_timed_and_waiting_for_others_is_none(tmp_path: Path) -> None:
    write_checkpoint("qwen3", tmp_path)
    config = EngineConfig.of(model=str(tmp_path), device="cpu", cpu_threads=1, kv_cache_tokens=64)
    moments = itertools.chain((0.0, 1.0, 3.0, 7.0, 15.0), (1000.0, 1016.0))
    rank = Rank(config, lambda: next(moments))
    hello = rank.load(TensorParallelGroup.alone(torch.device("cpu")))
    assert hello.startup == dict(zip(PHASES, (1.0, 2.0, 4.0, 8.0), strict=True))
    assert (hello.device, hello.dtype) == ("cpu", "float32")
    ready = rank.allocate(Start(num_pages=hello.num_pages))
    assert ready == Ready(rank=0, startup={"capture": 16.0})


def test_the_slowest_rank_of_a_phase_counts() -> None:
    ranks = [
        Hello(0, 1, 1, 1, startup={"load_weights": 3.0, "profile": 1.0}),
        Hello(1, 1, 1, 1, startup={"load_weights": 2.0, "profile": 5.0}),
    ]
    assert slowest(ranks) == {"load_weights": 3.0, "profile": 5.0}


def test_an_engine_reports_on_all_its_ranks(tmp_path: Path) -> None:
    (model := tmp_path / "model").mkdir()
    write_checkpoint("qwen3", model)
    (directory := tmp_path / "group").mkdir()
    config = EngineConfig.of(
        model=str(model),
        device="cpu",
        cpu_threads=1,
        kv_cache_tokens=64,
        tensor_parallel_size=2,
    )
    executor = LocalExecutor(config, str(directory), [1])
    try:
        info = executor.start()
    finally:
        executor.close()
    assert list(info.startup) == [*PHASES, "capture"]
    assert min(info.startup.values()) > 0.0
    assert (info.device, info.dtype, info.tensor_parallel_size) == ("cpu", "float32", 2)
