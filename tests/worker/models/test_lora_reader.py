"""Folders of LoRA adapters: what is read, and what is rejected, with a remedy."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels import Fp8Inputs, PackedLinear
from kernels.lora import LoraPart, LoraTiles, LoraWeights
from tests.support.checkpoints.adapters import write_adapter
from tests.support.checkpoints.dense import VOCAB_SIZE, write_checkpoint
from worker.models.config.model_config import load_model_config
from worker.models.config.peft import read_peft_config
from worker.models.layers.linear import ColumnParallelLinear, whole_part
from worker.models.layers.linear_method import LayerOptions
from worker.models.layers.lora import LoraLayer, LoraRows
from worker.models.layers.tensor_parallel import TensorParallelGroup
from worker.models.loading.adapters import ModelAdapters
from worker.models.loading.loader import build_without_weights

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
EMBEDDING = {
    f"base_model.model.model.embed_tokens.lora_embedding_{end}": torch.ones(*shape)
    for end, shape in (("A", (4, VOCAB_SIZE)), ("B", (64, 4)))
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    write_checkpoint("qwen3", folder)
    return folder


@pytest.fixture(scope="module")
def adapters(base: Path) -> ModelAdapters:
    model = build_without_weights(load_model_config(str(base)), 1)
    return ModelAdapters(model, max_loras=1, max_rank=16)


@pytest.fixture
def folder(base: Path, tmp_path: Path) -> Path:
    return write_adapter(base, tmp_path / "adapter", 4, targets=("q_proj", "o_proj"))


def configure(folder: Path, **values: Any) -> None:
    path = folder / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"peft_type": "LOHA"}, 'peft_type "LOHA"'),
        ({"use_dora": True}, "use_dora .*: train without DoRA"),
        ({"bias": "all"}, 'bias "all"'),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters .*experts"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base model"),
        ({"r": 17}, r"rank 17 .* --max-lora-rank \(16\)"),
        ({"r": 0}, "r in adapter_config.json must be a positive integer"),
        ({"r": True}, "positive integer"),
        ({"lora_alpha": "8"}, "lora_alpha .* must be a number"),
        ({"lora_alpha": 1e999}, "is not valid JSON"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern .* must be an object"),
        ({"rank_pattern": {"q_proj": 99}}, "rank 99"),
        ({"alpha_pattern": {"(a+)+": 1}}, "use module names"),
        ({"alpha_pattern": {"a" * 999: 1}}, "use module names"),
        ({"alpha_pattern": {"[": 1}}, "is not a valid regular expression"),
        ({"a_new_kind_of_lora": {"on": 1}}, "a_new_kind_of_lora"),
    ],
)
def test_unsupported_configurations_are_rejected(
    values: dict[str, Any], message: str, folder: Path
) -> None:
    configure(folder, **values)
    with pytest.raises(ValueError, match=message):
        read_peft_config(folder, 16)


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / WEIGHTS)


def set_tensor(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    return lambda folder: change(
        folder, lambda tensors: tensors.update({name: make(tensors[FIRST])})
    )


MEDDLINGS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (lambda folder: (folder / CONFIG).unlink(), f"has no {CONFIG}"),
    "no JSON": (lambda folder: (folder / CONFIG).write_text("{"), "is not valid JSON"),
    "deep JSON": (lambda folder: (folder / CONFIG).write_text("[" * 9999), "is not valid JSON"),
    "no object": (lambda folder: (folder / CONFIG).write_text("[]"), "must contain a JSON object"),
    "long JSON": (lambda folder: (folder / CONFIG).write_text(" " * 2**20 + "{}"), "larger than"),
    "pickled": (lambda folder: (folder / WEIGHTS).rename(folder / "adapter_model.bin"), "safe_"),
    "no tensors": (lambda folder: change(folder, dict.clear), "has no LoRA weights"),
    "garbage": (lambda folder: (folder / WEIGHTS).write_bytes(b"x" * 4), "not a safetensors file"),
    "cut": (
        lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-9]),
        "not a safetensors file",
    ),
    "many tensors": (
        lambda folder: (folder / WEIGHTS).write_bytes(struct.pack("<Q", 90 << 20)),
        "more than 34 tensors: the adapter is for another model",
    ),
    "one half": (
        lambda folder: change(folder, lambda tensors: tensors.pop(FIRST)),
        "is missing lora_A",
    ),
    "shape": (set_tensor(FIRST, lambda first: first[:, :9].contiguous()), r"shape \[4, 9\]"),
    "rank": (set_tensor(FIRST, lambda first: first[:3].contiguous()), r"shape \[3, 64\]"),
    "integers": (set_tensor(FIRST, lambda first: first.int()), "has type I32"),
    "not finite": (set_tensor(FIRST, lambda first: first * float("nan")), "not finite"),
    "DoRA": (
        set_tensor(FIRST.replace("lora_A.weight", "lora_magnitude_vector"), torch.clone),
        "lora_magnitude_vector in .* is not supported",
    ),
    "embedding": (
        lambda folder: change(folder, lambda tensors: tensors.update(EMBEDDING)),
        "LoRA for model.embed_tokens requires --enable-lora-embeddings",
    ),
    "other model": (
        lambda folder: change(
            folder,
            lambda tensors: tensors.update(
                {
                    FIRST.replace(".0.", ".99."): tensors[FIRST],
                    FIRST.replace(".0.", ".99.").replace("_A", "_B"): tensors[FIRST],
                }
            ),
        ),
        r"model.layers.99.self_attn.q_proj is not supported for this model",
    ),
}


@pytest.mark.parametrize("name", MEDDLINGS)
def test_hostile_and_unsupported_folders_are_rejected(
    name: str, folder: Path, adapters: ModelAdapters
) -> None:
    meddle, message = MEDDLINGS[name]
    meddle(folder)
    with pytest.raises(ValueError, match=message):
        adapters.read(folder)


def test_adapters_with_another_vocabulary_or_tied_ones_are_rejected(
    base: Path, folder: Path
) -> None:
    model = build_without_weights(load_model_config(str(base)), 1)
    adapters = ModelAdapters(model, max_loras=1, max_rank=16, with_vocabulary=True)
    own = {"base_model.model.model.embed_tokens.base_layer.weight": torch.zeros(VOCAB_SIZE, 64)}
    change(folder, lambda tensors: tensors.update(EMBEDDING | own))
    found, _ = adapters.read(folder).vocabulary
    assert found is not None
    assert (found.a.shape, found.b.shape) == ((VOCAB_SIZE, 4), (4, 64))
    configure(folder, ensure_weight_tying=True)
    with pytest.raises(ValueError, match=r"ensure_weight_tying .* merge the adapter"):
        adapters.read(folder)
    configure(folder, ensure_weight_tying=False)
    longer = {name: torch.zeros(VOCAB_SIZE + 3, 64) for name in own}
    change(folder, lambda tensors: tensors.update(longer))
    with pytest.raises(
        ValueError, match=r"embed_tokens .* \[512, 64\], .* a different vocabulary size"
    ):
        adapters.read(folder)
    first, second = EMBEDDING
    halves = {first.replace("embedding_A", "A.weight"): torch.ones(4, VOCAB_SIZE)}
    halves[second.replace("embedding_B", "B.weight")] = torch.ones(64, 4)
    change(folder, lambda tensors: [tensors.pop(name) for name in (*own, first, second)])
    change(folder, lambda tensors: tensors.update(halves))
    with pytest.raises(ValueError, match="embed_tokens has no lora_embedding_A"):
        adapters.read(folder)
    other = {"base_model.model.model.norm.base_layer.weight": torch.zeros(64)}
    change(folder, lambda tensors: tensors.update(other))
    with pytest.raises(ValueError, match=r"norm.base_layer.weight in .* is not supported"):
        adapters.read(folder)


def test_scales_follow_the_module_s_rank_and_alpha(folder: Path, adapters: ModelAdapters) -> None:
    """The first pattern that matches a name's end; rsLoRA divides by the root of the rank."""
    patterns = {r"layers\.1\.self_attn\.q_proj": 3, "q_proj": 5, "0.self_attn.o_proj": 7}
    configure(folder, lora_alpha=2, use_rslora=True, alpha_pattern=patterns)
    config = read_peft_config(folder, 16)
    names = [f"model.layers.{i}.self_attn.{kind}_proj" for i in range(2) for kind in "qo"]
    assert [2 * config.scale_of(name) for name in names] == [5, 7, 3, 2]
    adapter = adapters.read(folder)
    second = load_file(folder / WEIGHTS)[FIRST.replace("lora_A", "lora_B")]
    found = adapter.layers[0]
    assert found is not None
    assert torch.equal(found.b[:, : len(second)], (second.t() * 2.5).bfloat16())
    assert not found.b[:, len(second) :].any(), "keys and values have none"
    assert [layer is not None for layer in adapter.layers] == 2 * [True, True, False, False]
    configure(folder, rank_pattern={"q_proj": 5})
    with pytest.raises(ValueError, match=r"shape \[4, 64\], but \[5, 64\] is required"):
        adapters.read(folder)


class Fp8Capable(PackedLinear):
    """A weight that multiplies rows in FP8, too."""

    fp8_inputs = Fp8Inputs(by_block=False, min_rows=129)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return x.new_zeros(len(x), 8)


def test_layers_with_adapters_get_rows_that_are_not_quantized() -> None:
    """Else the norm before them would only pass on FP8 rows."""
    options = LayerOptions(
        group=TensorParallelGroup.alone(torch.device("cpu")),
        dtype=torch.float32,
        device=torch.device("cpu"),
        batch_invariant=False,
    )
    layer = ColumnParallelLinear(4, [whole_part("q_proj", 8)], bias=False, options=options)
    layer._packed = Fp8Capable()
    assert layer.fp8_inputs == Fp8Capable.fp8_inputs
    weights = LoraWeights.allocate(
        num_slots=1,
        in_features=4,
        parts=[LoraPart(0, 8, 0)],
        rank=1,
        dtype=torch.float32,
        device=torch.device("cpu"),
        batch_invariant=False,
    )
    weights.load(1, torch.ones(1, 1, 4), torch.ones(1, 8))
    rows = LoraRows()
    layer.lora = LoraLayer(weights, rows)
    assert layer.fp8_inputs is None
    x = torch.ones(3, 4)
    assert not layer.forward(x).any()
    tiles = LoraTiles(
        slots=torch.ones(1, dtype=torch.int32), tokens=torch.tensor([0, 2] + 14 * [-1]).int()
    )
    rows.set(tiles, 3)
    assert layer.forward(x)[:, 0].tolist() == [4, 0, 4]
    with pytest.raises(AssertionError, match="2 rows of 3 tokens"):
        layer.forward(x[:2])
