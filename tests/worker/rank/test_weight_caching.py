"""Runners that map packed weights give the same results as one that packed them, and read nothing
else."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from kernels.native import WeightMemory
from tests.support.checkpoints.dense import VOCAB_SIZE, write_checkpoint
from tests.support.engines.plan_driver import Request, generate, make_runner
from worker.models.config.model_config import load_model_config
from worker.models.layers.linear_method import LayerOptions
from worker.models.layers.tensor_parallel import TensorParallelGroup
from worker.models.loading.loader import build_model
from worker.models.loading.native import NativeOptions, weight_memory
from worker.rank.runner import ModelRunner

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files are locked as Linux does")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setattr("kernels.native.weight_cache.private_folder", lambda name: folder)
    return folder


def logits(runner: ModelRunner) -> torch.Tensor:
    tokens = np.random.default_rng(1).integers(0, VOCAB_SIZE, 40).tolist()
    requests = [
        Request(prompt=tokens[: 40 - 13 * slot], new_tokens=6, slot=slot) for slot in range(3)
    ]
    generate(runner, requests, chunk=32)
    return torch.stack([torch.stack(request.logits) for request in requests])


@pytest.mark.parametrize(("name", "is_tied"), [("qwen2", False), ("qwen3", True)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_second_start_maps_and_computes_the_same(
    tmp_path: Path,
    cache: Path,
    name: str,
    is_tied: bool,
    dtype: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    folder = tmp_path / "model"
    write_checkpoint(name, folder, tie_word_embeddings=is_tied)
    options = {"cpu_backend": "native", "dtype": dtype}
    expected = logits(make_runner(str(folder), **options))
    assert not list(cache.iterdir()), "unless it is asked for"
    for start in range(2):
        caplog.clear()
        runner = make_runner(str(folder), enable_weight_caching=True, **options)
        assert ("of packed weights" in caplog.text) == (start == 1)
        assert ("MB of weights in" in caplog.text) == (start == 0)
        assert torch.equal(logits(runner), expected)


def memory_of(folder: Path, rank: int = 0, world_size: int = 2, **changes: object) -> WeightMemory:
    """Memory of a rank's packed weights, without content."""
    cpu = torch.device("cpu")
    group = TensorParallelGroup(rank=rank, world_size=world_size, device=cpu, process_group=None)
    settings = {"group": group, "dtype": torch.float32, "device": cpu, "batch_invariant": False}
    options = LayerOptions(**{**settings, **changes})  # type: ignore[arg-type]  # of the test
    model = build_model(load_model_config(str(folder)), options, 64)
    native = NativeOptions(page_size=16, num_threads=1, required=True, weight_cache=True)
    with weight_memory(model, native) as memory:
        return memory


def test_a_file_is_of_one_share_of_one_checkpoint(tmp_path: Path, cache: Path) -> None:
    folder = tmp_path / "model"
    write_checkpoint("llama", folder)
    variants: list[dict[str, object]] = [{}, {"rank": 1}, {"dtype": torch.bfloat16}]
    variants.append({"world_size": 1})
    for variant in variants:
        assert not memory_of(folder, **variant).is_filled, variant  # type: ignore[arg-type]
    for variant in variants:
        assert memory_of(folder, **variant).is_filled, variant  # type: ignore[arg-type]
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "rms_norm_eps": 1e-3}))
    assert not memory_of(folder).is_filled


def test_what_torch_runs_has_no_file(tmp_path: Path, cache: Path) -> None:
    folder = tmp_path / "model"
    write_checkpoint("qwen2", folder)
    make_runner(str(folder), enable_weight_caching=True, cpu_backend="torch")
    make_runner(str(folder), enable_weight_caching=True, load_format="dummy")
    assert not list(cache.iterdir())
