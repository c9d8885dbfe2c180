"""Checks of `rayfleet serve` before starting Ray agree with those of ranks on loading."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.effort import IS_LONG
from tests.support.worker.real_configs import VERDICTS, load_corpus
from worker.models.config.model_config import ModelConfig
from worker.models.layers.linear_method import LayerOptions
from worker.models.layers.sharing import check_sharing
from worker.models.layers.tensor_parallel import TensorParallelGroup
from worker.models.loading import loader

pytestmark = pytest.mark.randomized  # with more sizes
SIZES = (2, 3, 5, 6, 8, 16) if IS_LONG else (3, 16)
OF_PACKED_WEIGHTS = ("a multiple of", "not whole blocks")
"""Parts of errors about quantized weights, which are only checked by ranks."""


def refusal(config: ModelConfig, world_size: int, *, experts: bool) -> str:
    """Error of a rank on building the model; empty without one. Allocates no weights."""
    group = TensorParallelGroup(
        rank=0, world_size=world_size, device=torch.device("meta"), process_group=None
    )
    options = LayerOptions(
        group=group,
        dtype=torch.bfloat16,
        device=group.device,
        batch_invariant=False,
        expert_parallel=experts,
    )
    try:
        loader.build_model(config, options, max_model_len=config.block_size)
    except ValueError as error:
        return str(error)
    return ""


def one_of_each_architecture() -> list[str]:
    verdicts = json.loads(VERDICTS.read_text(encoding="utf-8"))
    first: dict[str, str] = {}
    for name, said in verdicts.items():
        if "accepted" in said:
            first.setdefault(said["accepted"]["architecture"], name)
    return list(first.values())


@pytest.mark.parametrize("name", one_of_each_architecture())
def test_sizes_that_are_refused_are_those_that_layers_refuse(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = next(real for real in load_corpus() if real.name == name).read(tmp_path)
    monkeypatch.setattr(loader, "check_sharing", lambda *_, **__: None)
    for experts in (False, True) if config.moe is not None else (False,):
        for size in SIZES:
            found = refusal(config, size, experts=experts)
            if not found or any(words in found for words in OF_PACKED_WEIGHTS):
                check_sharing(config, size, expert_parallel=experts)
                continue
            with pytest.raises(ValueError, match=f"--tensor-parallel-size {size} ") as raised:
                check_sharing(config, size, expert_parallel=experts)
            _, remedy = str(raised.value).split("\n")
            assert str(size) not in remedy.rpartition("one of ")[2].split(", ")
