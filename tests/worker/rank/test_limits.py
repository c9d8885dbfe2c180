"""Default limits of requests and tokens of a step, by device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from worker.config import EngineConfig
from worker.models.layers.tensor_parallel import TensorParallelGroup
from worker.rank.limits import limits_of_gpu, resolve_limits


class Voters(TensorParallelGroup):
    """Two ranks on large GPUs, or the other one on a small one."""

    def __init__(self, others: float) -> None:
        self.rank, self.world_size, self.device = 0, 2, torch.device("cuda")
        self._others = others

    def all_reduce(self, tensor: torch.Tensor, *, fixed_order: bool = False) -> torch.Tensor:
        return tensor + self._others


def limits(group: TensorParallelGroup, state_bytes: int = 0, **options: int) -> tuple[int, int]:
    config = resolve_limits(EngineConfig.of(model="any", **options), group, state_bytes=state_bytes)
    return config.scheduling.max_num_seqs, config.scheduling.max_num_batched_tokens


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


def test_what_is_given_counts() -> None:
    alone = TensorParallelGroup.alone(torch.device("cpu"))
    assert limits(alone) == (64, 1024)
    assert limits(alone, max_num_seqs=7) == (7, 1024)
    assert limits(alone, max_num_batched_tokens=512) == (64, 512)
    assert limits(alone, max_num_batched_tokens=32) == (32, 32), "a default gives way"
    assert limits(alone, max_num_seqs=2000) == (2000, 2000)


def test_ranks_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="H100", total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch, "full", lambda _, value, **__: torch.tensor([value]))
    assert limits(Voters(1.0)) == (1024, 8192)
    assert limits(Voters(0.0)) == (256, 2048)


def test_states_take_a_share_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every rank's GPU: 64 MB each, as of Qwen3.5-35B-A3B."""
    properties = SimpleNamespace(name="H100", total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch, "full", lambda _, value, **__: torch.tensor([value]))
    tensor = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda values, **__: tensor(values))
    assert limits(Voters(1.0), 64 << 20) == (256, 8192)
    assert limits(Voters(1.0), 1 << 20) == (1024, 8192)
    assert limits(Voters(1.0), 64 << 30) == (1, 8192), "one fits with less for pages"
    assert limits(Voters(1.0), 64 << 20, max_num_seqs=500) == (500, 8192)
    assert limits(TensorParallelGroup.alone(torch.device("cpu")), 64 << 20) == (64, 1024)


def test_negative_ones_are_refused() -> None:
    with pytest.raises(ValueError, match="--max-num-seqs must not be negative"):
        EngineConfig.of(model="any", max_num_seqs=-1)


def test_each_running_request_needs_a_token_of_the_step() -> None:
    expected = r"--max-num-batched-tokens \(8\) must be at least --max-num-seqs \(9\)"
    with pytest.raises(ValueError, match=expected):
        EngineConfig.of(model="any", max_num_seqs=9, max_num_batched_tokens=8)
    equal = EngineConfig.of(model="any", max_num_seqs=8, max_num_batched_tokens=8)
    assert equal.scheduling.max_num_seqs == 8
