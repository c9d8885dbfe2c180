"""Random weights only need a config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints.canvases import CANVAS_CONFIG
from tests.support.checkpoints.dense import write_checkpoint
from tests.support.checkpoints.families import SPECIMENS
from tests.support.checkpoints.moe import LLADA2, SDAR_MOE
from tests.support.checkpoints.specimen import write_config
from tests.support.engines.plan_driver import Request, generate, make_runner
from worker.models.architectures.decoder import DecoderModel
from worker.models.config.checkpoint import block_hash_salt
from worker.models.config.families import FAMILIES, MULTIMODAL
from worker.models.config.model_config import load_model_config
from worker.models.layers.linear_method import LayerOptions
from worker.models.layers.tensor_parallel import TensorParallelGroup
from worker.models.loading.loader import build_model, fill_dummy_weights


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
    fill_dummy_weights(first)
    fill_dummy_weights(second)
    for one, other in zip(*slots, strict=True):
        assert torch.equal(one.destination, other.destination), one.name
        if len(one.full_shape) > 1:
            assert 0.015 < float(one.destination.std()) < 0.025, one.name
        else:
            assert bool((one.destination == (0.0 if "bias" in one.name else 1.0)).all()), one.name
    layers = [slot.destination for slot in slots[0] if "q_proj.weight" in slot.name]
    assert not torch.equal(layers[0], layers[1])


OF_EXPERTS = ("experts", "moe", "sparse", "mlp_only", "topk")
OF_OTHERS: dict[str, Any] = {
    "SDARForCausalLM": {
        **{key: SDAR_MOE[key] for key in SDAR_MOE if not any(part in key for part in OF_EXPERTS)},
        **{"architectures": ["SDARForCausalLM"], "model_type": "sdar"},
    },
    "SDARMoeForCausalLM": SDAR_MOE,
    "LLaDA2MoeModelLM": LLADA2,
    "DiffusionGemmaForBlockDiffusion": CANVAS_CONFIG,
}
"""config.json of families that transformers lacks, or that generate no single tokens."""
SPECIMEN_OF = {specimen.served_architecture: name for name, specimen in SPECIMENS.items()}


def _has_other_layers(architecture: str) -> bool:
    """Whether `make test` runs the family: its test checkpoint stands for a kind of layer or cache,
    or it has none."""
    name = SPECIMEN_OF.get(architecture)
    return name is None or bool(SPECIMENS[name].covers)


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(name, marks=() if _has_other_layers(name) else pytest.mark.long)
        for name in FAMILIES
    ],
)
def test_every_family_runs_on_random_weights(architecture: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    # The language model of a multimodal model stands for a family without another checkpoint here.
    served = {
        architecture,
        *(name for name, config in MULTIMODAL.items() if architecture in config.texts.values()),
    }
    own = [architecture] if architecture in SPECIMEN_OF else []
    known = [SPECIMEN_OF[name] for name in (*own, *SPECIMEN_OF) if name in served]
    if architecture in OF_OTHERS:
        (tmp_path / "config.json").write_text(json.dumps(OF_OTHERS[architecture]))
    else:
        write_config(SPECIMENS[known[0]], tmp_path)
    runner = make_runner(str(tmp_path), load_format="dummy")
    assert runner.model_config.architecture == architecture
    if runner.model_config.diffusion_size > 1:
        return
    request = Request(prompt=list(range(5, 40)), new_tokens=2)
    generate(runner, [request])
    assert torch.stack(request.logits).isfinite().all()


def test_a_checkpoint_without_weights_is_refused_otherwise(folder: str) -> None:
    with pytest.raises(ValueError, match=r"no \*\.safetensors file"):
        load_model_config(folder)
    assert block_hash_salt(Path(folder), weights=False)
