"""FP8 weights give the results of the dequantized checkpoint, on one rank or several."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints.fp8 import QUANTIZATION, write_fp8, write_fp8_moe
from tests.support.checkpoints.moe import LLADA2, QWEN3_MOE
from tests.support.engines.plan_driver import Request, generate, make_runner
from worker.models.config.model_config import load_model_config
from worker.models.layers.linear_method import LayerOptions
from worker.models.layers.tensor_parallel import TensorParallelGroup
from worker.models.loading.loader import build_model, fill_dummy_weights, load_weights

PROMPT = [5, 17, 300, 4, 8, 100, 32, 11, 250]


@pytest.mark.checks(
    formats=["fp8-blocks"], of=("qwen3", "llama"), against="the same weights dequantized"
)
@pytest.mark.parametrize(
    ("name", "cpu_backend"), [("qwen3", "auto"), ("qwen3", "torch"), ("llama", "auto")]
)
def test_logits_are_those_of_the_dequantized_checkpoint(
    tmp_path: Path, name: str, cpu_backend: str
) -> None:
    torch.set_num_threads(1)
    model = write_fp8(name, tmp_path / "fp8", tmp_path / "plain")
    found = []
    for folder in ("fp8", "plain"):
        runner = make_runner(str(tmp_path / folder), cpu_backend=cpu_backend)
        request = Request(prompt=PROMPT)
        generate(runner, [request])
        found.append(request)
    assert found[0].tokens == found[1].tokens
    assert torch.equal(torch.stack(found[0].logits), torch.stack(found[1].logits))
    with torch.inference_mode():
        sequence = torch.tensor([PROMPT + found[0].tokens[:-1]])
        expected = model(sequence).logits[0, len(PROMPT) - 1 :]
    torch.testing.assert_close(torch.stack(found[0].logits), expected, atol=1e-4, rtol=0)


@pytest.mark.checks(
    formats=["fp8-blocks"], of="Qwen3MoeForCausalLM", against="the same weights dequantized"
)
def test_a_mixture_of_experts_draws_what_the_dequantized_one_draws(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    write_fp8_moe(QWEN3_MOE, tmp_path / "fp8", tmp_path / "plain")
    found = []
    for folder in ("fp8", "plain"):
        request = Request(prompt=[5, 17, 30, 4, 8])
        generate(make_runner(str(tmp_path / folder)), [request])
        found.append(request)
    assert found[0].tokens == found[1].tokens
    assert torch.equal(torch.stack(found[0].logits), torch.stack(found[1].logits))


def test_rows_that_are_put_into_another_order_keep_their_scales(tmp_path: Path) -> None:
    """As in families with interleaved rotary pairs."""
    torch.set_num_threads(1)
    write_fp8("qwen2", tmp_path / "fp8", tmp_path / "plain")
    generator = torch.Generator().manual_seed(1)
    inputs, found = torch.randn(3, 64, generator=generator), []
    rows = torch.randperm(256, generator=generator)
    for folder in ("fp8", "plain"):
        qkv = load(tmp_path / folder, 0, 1).layers[0].attention.qkv
        qkv.reorder(rows)
        qkv.process_after_loading()
        found.append(qkv.forward(inputs))
    assert torch.equal(*found)


@pytest.mark.parametrize("world_size", [1, 4])
def test_ranks_hold_the_same_experts(tmp_path: Path, world_size: int) -> None:
    config = {**LLADA2, "num_attention_heads": 4, "num_key_value_heads": 4}
    write_fp8_moe(config, tmp_path / "fp8", tmp_path / "plain")
    for rank in range(world_size):
        own, expected = (build(tmp_path / name, rank, world_size) for name in ("fp8", "plain"))
        for model in (own, expected):
            load_weights(model, model.config, show_progress=False)
        experts, others = (model.layers[1].mlp._experts._experts for model in (own, expected))
        for weights, other in zip(experts, others, strict=True):
            assert weights.scaling is None, "on CPU they are dequantized when they are packed"
            assert torch.equal(weights.values, other.values), rank


def build(folder: Path, rank: int, world_size: int) -> Any:
    cpu = torch.device("cpu")
    group = TensorParallelGroup(rank=rank, world_size=world_size, device=cpu, process_group=None)
    options = LayerOptions(group=group, dtype=torch.float32, device=cpu, batch_invariant=False)
    model = build_model(load_model_config(str(folder)), options, 64)
    return model


def load(folder: Path, rank: int, world_size: int) -> Any:
    """A loaded model whose weights are still unpacked."""
    model = build(folder, rank, world_size)
    model.process_after_loading = lambda: None  # compare weights as loaded
    load_weights(model, model.config, show_progress=False)
    return model


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_whose_shares_begin_within_a_block_hold_the_same_weights(
    tmp_path: Path, world_size: int
) -> None:
    write_fp8("qwen2", tmp_path / "fp8", tmp_path / "plain")
    for rank in range(world_size):
        own = load(tmp_path / "fp8", rank, world_size)
        expected = load(tmp_path / "plain", rank, world_size)
        for layer, other in zip(own.layers, expected.layers, strict=True):
            for block, linear in (
                *(("attention", name) for name in ("qkv", "output")),
                *(("mlp", name) for name in ("gate_up", "down")),
            ):
                weights = [
                    getattr(getattr(one, block), linear).weight.dense() for one in (layer, other)
                ]
                assert torch.equal(*weights), (rank, block, linear)


def test_random_weights_need_no_checkpoint(tmp_path: Path) -> None:
    write_fp8("qwen3", tmp_path / "fp8", tmp_path / "plain")
    model = build(tmp_path / "fp8", 0, 1)
    slots = {slot.name: slot.destination for slot in model.weight_slots()}
    fill_dummy_weights(model)
    name = "model.layers.0.mlp.down_proj.weight"
    assert 0.015 < float(slots[name].float().std()) < 0.025
    assert bool((slots[f"{name}_scale_inv"] == 1.0).all())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"quant_method": "awq", "bits": 4}, "the key fmt"),
        ({"quant_method": None}, "quant_method null"),
        ({"scale_fmt": "other"}, 'scale_fmt "other"'),
        ({"weight_block_size": []}, r"weight_block_size .* got \[\]"),
    ],
)
def test_other_formats_are_rejected_with_their_name(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    write_fp8("qwen3", tmp_path / "fp8", tmp_path / "plain")
    path = tmp_path / "fp8" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = QUANTIZATION | changes
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=named):
        load_model_config(str(tmp_path / "fp8"))


def test_fp8_weights_without_scales_or_where_none_are_spoken_of(tmp_path: Path) -> None:
    write_fp8("qwen3", tmp_path / "fp8", tmp_path / "plain")
    plain = tmp_path / "plain" / "model.safetensors"
    tensors = load_file(tmp_path / "fp8" / "model.safetensors")
    kept = {key: value for key, value in tensors.items() if not key.endswith("scale_inv")}
    save_file(kept, plain)
    with pytest.raises(ValueError, match="F8_E4M3"):
        load(tmp_path / "plain", 0, 1)
    save_file(kept, tmp_path / "fp8" / "model.safetensors")
    with pytest.raises(ValueError, match="weight_scale_inv"):
        load(tmp_path / "fp8", 0, 1)
