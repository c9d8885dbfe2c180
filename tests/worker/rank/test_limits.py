"""Default limits of requests and tokens of a step, by device."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.support.checkpoints.dense import write_checkpoint
from worker.config import EngineConfig
from worker.models.config.model_config import ModelConfig, load_model_config
from worker.models.layers.tensor_parallel import TensorParallelGroup
from worker.rank.limits import limits_of_gpu, resolve_limits


class Voters(TensorParallelGroup):
    """Two ranks on large GPUs, or the other one on a small one."""

    def __init__(self, others: float) -> None:
        self.rank, self.world_size, self.device = 0, 2, torch.device("cuda")
        self._others = others

    def all_reduce(self, tensor: torch.Tensor, *, fixed_order: bool = False) -> torch.Tensor:
        return tensor + self._others


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = tmp_path_factory.mktemp("qwen3")
    write_checkpoint("qwen3", folder)
    return load_model_config(str(folder))


def limits(model: ModelConfig, group: TensorParallelGroup, **options: int) -> tuple[int, int]:
    config = resolve_limits(EngineConfig(model="any", **options), model, group)
    return config.max_num_seqs, config.max_num_batched_tokens


@pytest.mark.parametrize(
    ("name", "gib", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", 79, (1024, 8192)),
        ("NVIDIA B200", 178, (1024, 8192)),
        ("NVIDIA A100-SXM4-80GB", 79, (256, 2048)),
        ("NVIDIA L40S", 44, (256, 2048)),
    ],
)
def test_memory_decides_on_gpus(name: str, gib: int, expected: tuple[int, int]) -> None:
    assert limits_of_gpu(name, gib << 30) == expected


def test_what_is_given_counts(model: ModelConfig) -> None:
    alone = TensorParallelGroup.alone(torch.device("cpu"))
    assert limits(model, alone) == (64, 1024)
    assert limits(model, alone, max_num_seqs=7) == (7, 1024)
    assert limits(model, alone, max_num_batched_tokens=512) == (64, 512)
    assert limits(model, alone, max_num_batched_tokens=32) == (32, 32), "a default gives way"
    assert limits(model, alone, max_num_seqs=2000) == (2000, 2000)


def test_ranks_agree(model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="H100", total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch, "full", lambda _, value, **__: torch.tensor([value]))
    assert limits(model, Voters(1.0)) == (1024, 8192)
    assert limits(model, Voters(0.0)) == (256, 2048)


def test_slots_with_states_are_few(model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="H100", total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch, "full", lambda _, value, **__: torch.tensor([value]))
    assert limits(replace(model, linear_layers=frozenset({0})), Voters(1.0)) == (64, 8192)


def test_negative_ones_are_refused() -> None:
    with pytest.raises(ValueError, match="--max-num-seqs must not be negative"):
        EngineConfig(model="any", max_num_seqs=-1)


def test_each_running_request_needs_a_token_of_the_step() -> None:
    expected = (
        r"--max-num-batched-tokens \(8\) must be greater than or equal to --max-num-seqs \(9\)"
    )
    with pytest.raises(ValueError, match=expected):
        EngineConfig(model="any", max_num_seqs=9, max_num_batched_tokens=8)
    assert EngineConfig(model="any", max_num_seqs=8, max_num_batched_tokens=8).max_num_seqs == 8
