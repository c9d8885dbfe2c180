"""Random weights need a config.json and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.checkpoints.dense import write_checkpoint
from worker.models.checkpoint import block_hash_salt
from worker.models.config import load_model_config
from worker.models.decoder import DecoderModel
from worker.models.linear_method import LayerOptions
from worker.models.loader import build_model, draw_weights
from worker.models.tensor_parallel import TensorParallelGroup


@pytest.fixture
def folder(tmp_path: Path) -> str:
    write_checkpoint("qwen2", tmp_path)
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    return str(tmp_path)


def build(folder: str) -> DecoderModel:
    cpu = torch.device("cpu")
    options = LayerOptions(
        group=TensorParallelGroup.alone(cpu),
        dtype=torch.float32,
        device=cpu,
        batch_invariant=False,
    )
    return build_model(load_model_config(folder, weights=False), options, 64)


def test_weights_are_random_and_the_same_each_time(folder: str) -> None:
    first, second = build(folder), build(folder)
    slots = [list(model.weight_slots()) for model in (first, second)]
    draw_weights(first)
    draw_weights(second)
    for one, other in zip(*slots, strict=True):
        assert torch.equal(one.destination, other.destination), one.name
        if len(one.full_shape) > 1:
            assert 0.015 < float(one.destination.std()) < 0.025, one.name
        else:
            assert bool((one.destination == (0.0 if "bias" in one.name else 1.0)).all()), one.name
    layers = [slot.destination for slot in slots[0] if "q_proj.weight" in slot.name]
    assert not torch.equal(layers[0], layers[1])


def test_a_checkpoint_without_weights_is_refused_otherwise(folder: str) -> None:
    with pytest.raises(ValueError, match=r"no \*\.safetensors file"):
        load_model_config(folder)
    assert block_hash_salt(Path(folder), weights=False)
