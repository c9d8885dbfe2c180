"""Quantized weights of every layout give the results of the dequantized ones."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints.quantized import (
    CONFIG,
    LAYOUTS,
    compressed_config,
    write_quantized,
)
from tests.support.engines.plan_driver import Request, generate, make_runner
from worker.models.config.model_config import ModelConfig, load_model_config
from worker.models.config.multimodal import TensorNames
from worker.models.config.quantization import Fp4Config, QuantizationConfig, ScaledConfig
from worker.models.layers.linear import ColumnParallelLinear, ColumnPart
from worker.models.layers.linear_method import LayerOptions
from worker.models.layers.quantized_linear import QuantizedMethod
from worker.models.layers.tensor_parallel import TensorParallelGroup
from worker.models.loading.loader import build_model, fill_dummy_weights, load_weights


def build(folder: Path, rank: int = 0, world_size: int = 1, **further: bool) -> Any:
    """A model on one rank with unset, unpacked weights."""
    cpu = torch.device("cpu")
    group = TensorParallelGroup(rank=rank, world_size=world_size, device=cpu, process_group=None)
    options = LayerOptions(
        group=group, dtype=torch.float32, device=cpu, batch_invariant=False, **further
    )
    model: Any = build_model(load_model_config(str(folder), weights=False), options, 64)
    model.process_after_loading = lambda: None  # weights are compared as loaded
    return model


def loaded(folder: Path, rank: int, world_size: int, **further: bool) -> list[torch.Tensor]:
    """All linear weights [out, in] of a rank."""
    model = build(folder, rank, world_size, **further)
    load_weights(model, model.config, show_progress=False)
    return dense(model)


def dense(model: Any) -> list[torch.Tensor]:
    (layer,) = model.layers
    attention = (layer.attention.qkv.weight, layer.attention.output.weight)
    with torch.inference_mode():
        experts = layer.mlp._experts
        return [weight.dense() for weight in (*attention, experts._gate_up, experts._down)]


@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_are_the_dequantized_ones(tmp_path: Path, name: str) -> None:
    """Ranks' shares start within groups, and the last group of a row is incomplete."""
    write_quantized(LAYOUTS[name], tmp_path / "own", tmp_path / "plain")
    for rank, world_size in ((0, 1), (1, 2)):
        found, expected = (loaded(tmp_path / which, rank, world_size) for which in ("own", "plain"))
        for own, other in zip(found, expected, strict=True):
            torch.testing.assert_close(own, other, rtol=3e-7, atol=0)


@pytest.mark.parametrize(
    ("name", "left_out"), [*((name, "") for name in LAYOUTS), ("nvfp4", "experts[.]0[.]")]
)
def test_ranks_read_experts_whole(tmp_path: Path, name: str, left_out: str) -> None:
    """Regardless of how other ranks' experts are stored."""
    settings = {"quantization": EXCEPT} if left_out else {}
    write_quantized(
        LAYOUTS[name], tmp_path / "own", tmp_path / "plain", *left_out.split(), **settings
    )
    whole = loaded(tmp_path / "own", 0, 1)[2:]
    for rank in range(2):
        share = loaded(tmp_path / "own", rank, 2, expert_parallel=True)[2:]
        for own, full in zip(share, whole, strict=True):
            assert torch.equal(own, full.chunk(2)[rank])


@pytest.mark.checks(
    formats=LAYOUTS, of="Qwen3MoeForCausalLM", against="the same weights dequantized"
)
@pytest.mark.parametrize("name", ["awq", "nvfp4", "gptq-index"])
def test_experts_draw_what_the_dequantized_ones_draw(tmp_path: Path, name: str) -> None:
    torch.set_num_threads(1)
    write_quantized(LAYOUTS[name], tmp_path / "own", tmp_path / "plain")
    found = []
    for folder in ("own", "plain"):
        request = Request(prompt=[5, 17, 30, 4, 8])
        generate(make_runner(str(tmp_path / folder)), [request])
        found.append(request)
    assert found[0].tokens == found[1].tokens
    torch.testing.assert_close(found[0].logits, found[1].logits, rtol=0, atol=2e-5)


EXCEPT = {"quant_algo": "NVFP4", "exclude_modules": ["*.experts.0.*"]}


@pytest.mark.parametrize(
    ("layout", "left_out", "settings"),
    [
        ("awq", "self_attn|[.]1[.]up", {"modules_to_not_convert": ["self_attn", "1.up_proj"]}),
        ("int4", "q_proj", {"ignore": ["re:.*q_proj"]}),
        ("nvfp4", "experts[.]0[.]", {"quantization": EXCEPT}),
    ],
)
def test_modules_that_are_left_out_are_plain(
    tmp_path: Path, layout: str, left_out: str, settings: dict[str, Any]
) -> None:
    """Including modules that are fused with quantized ones."""
    folders = tmp_path / "own", tmp_path / "plain"
    write_quantized(LAYOUTS[layout], *folders, left_out, **settings)
    found, expected = (loaded(folder, 0, 1) for folder in folders)
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=3e-7, atol=0)


@pytest.mark.parametrize("fp8", ["k_proj|o_proj", r"experts[.]1[.]|o_proj", "self_attn"])
def test_modules_may_have_formats_of_their_own(tmp_path: Path, fp8: str) -> None:
    """As mixed by ModelOpt: alone, fused with others, and some of the experts; modules in no list
    are unquantized."""
    modules = [f"self_attn.{part}_proj" for part in "qkvo"]
    modules += [f"mlp.experts.{n}.{part}_proj" for n in range(4) for part in ("gate", "up", "down")]
    del modules[-1]
    settings = {
        f"model.layers.0.{name}": {"quant_algo": "FP8"}
        if re.search(fp8, name)
        else {"quant_algo": "W4A16_NVFP4" if "experts" in name else "NVFP4", "group_size": 16}
        for name in modules
    }
    folders = tmp_path / "own", tmp_path / "plain"
    write_quantized(
        *(LAYOUTS["nvfp4"], *folders, r"experts[.]3[.]down"),
        other=(fp8, LAYOUTS["fp8-tensor-of-one"]),
        quantization={"quant_algo": "MIXED_PRECISION", "quantized_layers": settings},
    )
    found, expected = (loaded(folder, 0, 1) for folder in folders)
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=3e-7, atol=0)


def test_a_module_within_a_named_one_has_its_format() -> None:
    fp8, nvfp4 = ScaledConfig(block_shape=(0, 0)), Fp4Config(layout="modelopt")
    config = QuantizationConfig(
        weights=None, by_module={"a.mlp": fp8, "a.mlp.up": nvfp4}, left_out=("a.mlp.gate",)
    )
    names = ("a.mlp.experts.3.up", "a.mlp.up", "a.mlp.gate", "a.mlpx", "b", "")
    assert [config.format_of([name]) for name in names] == [fp8, nvfp4, None, None, None, None]
    assert config.format_of(["text.a.mlp.up", "a.mlp.up"]) == nvfp4


def test_patterns_of_modules_that_are_left_out() -> None:
    patterns = ("gate", "a.1", "re:b[.]\\d", "re:b[.]up", "*.norm*")
    config = QuantizationConfig(weights=Fp4Config(layout="modelopt"), left_out=patterns)
    matching = ("x.gate.y", "gate", "x.a.1.y", "b.7x", "b.up", "x.norm2.y")
    others = ("gate_proj", "xa.1", "a.12", "x.b.7", "norm")
    assert not any(config.format_of([name]) for name in matching)
    assert all(config.format_of([name]) for name in others)


def test_patterns_take_time_linear_in_layers() -> None:
    """Comparing each module with each pattern is quadratic: 8 s for DeepSeek V3 in NVFP4."""

    def seconds(num_layers: int) -> float:
        layers = [f"model.layers.{layer}" for layer in range(num_layers)]
        names = [f"{layer}.self_attn.{end}" for layer in layers for end in ("q", "k", "v", "o")]
        config = QuantizationConfig(weights=Fp4Config(layout="modelopt"), left_out=(*names,))
        start = time.process_time()
        for layer in layers:
            for expert in range(32):
                config.format_of([f"{layer}.mlp.experts.{expert}.up"])
        return time.process_time() - start

    assert min(seconds(160) for _ in range(3)) < 20 * min(seconds(20) for _ in range(3))


@pytest.mark.parametrize("name", LAYOUTS)
def test_random_weights_need_no_checkpoint(tmp_path: Path, name: str) -> None:
    write_quantized(LAYOUTS[name], tmp_path / "own", tmp_path / "plain")
    (tmp_path / "own" / "model.safetensors").unlink()
    model = build(tmp_path / "own")
    fill_dummy_weights(model)
    for weight in dense(model):
        assert 0.012 < float(weight.std()) < 0.03


@pytest.mark.parametrize("name", ["awq", "gptq", "gptq-index", "int4-zeros"])
def test_shares_within_a_word_are_refused(tmp_path: Path, name: str) -> None:
    """With four ranks of 4 of 16 keys, or 8 of 32 columns, each."""
    config = {**CONFIG, "num_key_value_heads": 4, "head_dim": 4}
    write_quantized(LAYOUTS[name], tmp_path / "own", tmp_path / "plain")
    raw = json.loads((tmp_path / "own" / "config.json").read_text())
    (tmp_path / "own" / "config.json").write_text(json.dumps({**config, **raw, "head_dim": 4}))
    model = build(tmp_path / "own", 1, 4)
    with pytest.raises(ValueError, match=r"--tensor-parallel-size 4 .* not a multiple of 8"):
        list(model.weight_slots())


def test_an_index_that_was_not_said_is_refused(tmp_path: Path) -> None:
    write_quantized(LAYOUTS["gptq"], tmp_path / "own", tmp_path / "plain")
    path = tmp_path / "own" / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.self_attn.o_proj.g_idx"
    tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"g_idx .* set it to true"):
        loaded(tmp_path / "own", 0, 1)


def test_an_index_of_no_group_is_refused(tmp_path: Path) -> None:
    write_quantized(LAYOUTS["gptq-index"], tmp_path / "own", tmp_path / "plain")
    path = tmp_path / "own" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.self_attn.o_proj.g_idx"][5] = 3
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"g_idx of .*o_proj has groups beyond the 3"):
        loaded(tmp_path / "own", 0, 1)


def of_compressed(**weights: Any) -> dict[str, Any]:
    return compressed_config("pack-quantized", type="int", group_size=32, **weights)


def with_transforms(transforms: dict[str, Any]) -> dict[str, Any]:
    return {**of_compressed(strategy="group"), "transform_config": transforms}


def rotated(*locations: str) -> dict[str, Any]:
    """A rotation at these locations, in compressed-tensors' transform_config."""
    applied = [{"location": one, "targets": ["re:.*q_proj$"]} for one in locations]
    return {"config_groups": {"R1": {"type": "hadamard", "apply": applied}}}


MIXED = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"quant_method": "bitsandbytes"}, 'quant_method "bitsandbytes"'),
        ({**GPTQ, "bits": 3}, "bits 3"),
        ({**GPTQ, "group_size": 0}, "group_size must be .* got 0"),
        ({**GPTQ, "dynamic": {".*down_proj": {"bits": 8}}}, 'dynamic ".*down_proj"'),
        ({**GPTQ, "dynamic": {"-:*": {}}}, 'pattern "re:.*" is not a valid'),
        ({**GPTQ, "checkpoint_format": "marlin"}, 'checkpoint_format "marlin"'),
        ({**AWQ, "version": "gemv"}, 'version "gemv"'),
        ({**AWQ, "zero_point": False}, "zero_point false"),
        ({**AWQ, "modules_to_not_convert": "gate"}, 'modules_to_not_convert must be .* got "gate"'),
        (
            {"quant_method": "fp8", "weight_block_size": [128]},
            "weight_block_size must be .* got .128",
        ),
        ({"quant_method": "fp8", "scale_fmt": "other"}, 'scale_fmt "other"'),
        ({"quant_method": "fp8", "activation_scheme": "other"}, 'activation_scheme "other"'),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, 'quant_algo "W4A8_AWQ"'),
        ({"quant_algo": "NVFP4", "group_size": 32}, "group_size 32"),
        (MIXED, '"MIXED_PRECISION" without quantized_layers'),
        ({**MIXED, "quantized_layers": {"a": {"quant_algo": "W8A16"}}}, 'quant_algo "W8A16"'),
        ({**MIXED, "quantized_layers": {"a": {"has_zero_point": True}}}, "the key has_zero_point"),
        (of_compressed(strategy="group", actorder="group"), 'actorder "group"'),
        (of_compressed(strategy="block"), 'strategy "block"'),
        (of_compressed(strategy="group", num_bits=3), "num_bits 3"),
        ({**of_compressed(strategy="group"), "format": "marlin-24"}, 'format "marlin-24"'),
        (with_transforms({"a": 1}), "the key a"),
        (with_transforms({"config_groups": {"R1": {"type": "hadamard"}}}), "config_groups"),
        (with_transforms(rotated("weight_input", "input")), 'location "input"'),
        (with_transforms(rotated("k_cache")), 'location "k_cache"'),
        ({**of_compressed(strategy="group"), "config_groups": {}}, "config_groups"),
    ],
)
def test_other_formats_are_rejected_with_their_name(
    tmp_path: Path, settings: dict[str, Any], named: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=f"quantization_config in config.json(:| has) .*{named}"):
        ModelConfig.parse({**CONFIG, "quantization_config": settings}, tmp_path)


def test_rotations_of_saved_weights_change_nothing(tmp_path: Path) -> None:
    """As in Laguna's FP8 checkpoints: they were applied before the weights were saved."""
    (tmp_path / "config.json").write_text("{}")
    plain, rotation = of_compressed(strategy="group"), rotated("weight_output", "weight_input")
    read = [
        ModelConfig.parse({**CONFIG, "quantization_config": settings}, tmp_path)
        for settings in (plain, with_transforms(rotation))
    ]
    assert read[0] == read[1]


def test_modelopts_mixture_may_be_listed_beside_config_json(tmp_path: Path) -> None:
    layers = {"model.layers.0.mlp": {"quant_algo": "W4A16_NVFP4", "group_size": 16}}
    content = {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(content))
    config = ModelConfig.parse({**CONFIG, "quantization_config": MIXED}, tmp_path)
    assert config.quantization is not None
    assert config.quantization.format_of(["model.layers.0.mlp.up_proj"]) is not None
    assert config.quantization.format_of(["model.layers.1.mlp.up_proj"]) is None


def test_gptq_leaves_out_what_dynamic_excludes(tmp_path: Path) -> None:
    """As in Qwen3.5's GPTQ checkpoints."""
    excluded = {"lm_head": {}, "-:.*attn.*": {}, "-:.*shared_expert.*": {}}
    raw = {**CONFIG, "quantization_config": {**GPTQ, "dynamic": excluded}}
    quantization = ModelConfig.parse(raw, tmp_path).quantization
    assert quantization is not None
    names = ("self_attn.q_proj", "mlp.shared_expert.up_proj", "mlp.up_proj")
    found = [quantization.format_of([f"model.layers.0.{name}"]) is None for name in names]
    assert found == [True, True, False]


LAYER, IN_TEXT = "model.layers.1", "language_model.model.layers.1"


@pytest.mark.parametrize(
    ("pattern", "names", "fits"),
    [
        ("gate", [f"{LAYER}.mlp.gate_proj"], False),
        ("mlp.shared_expert", [f"{LAYER}.mlp.shared_expert.up_proj"], True),
        ("model.layers.1*", [f"{LAYER}.mlp.up_proj"], True),
        ("re:.*self_attn.*", [f"{LAYER}.self_attn.q_proj"], True),
        ("re:self_attn", [f"{LAYER}.self_attn.q_proj"], False),
        (IN_TEXT, [f"{LAYER}.mlp.up_proj", f"{IN_TEXT}.mlp.up_proj"], True),
    ],
)
def test_patterns_name_modules(pattern: str, names: list[str], fits: bool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    settings = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 32,
        "modules_to_not_convert": [pattern],
    }
    config = ModelConfig.parse({**CONFIG, "quantization_config": settings}, tmp_path)
    assert config.quantization is not None
    assert (config.quantization.format_of(names) is None) is fits


def test_a_wrapper_knows_a_module_by_all_of_its_names() -> None:
    names = TensorNames(renamed=(("language_model.", ""), ("model.text.", "model.")))
    assert names.checkpoint_names("model.norm") == [
        "model.norm",
        "language_model.model.norm",
        "model.text.norm",
    ]


def test_blocks_begin_anew_in_each_section_of_a_weight() -> None:
    """MiMo V2.5 Pro quantized its groups of heads separately, none of which has whole blocks of
    rows."""
    config = ScaledConfig(block_shape=(8, 8), scale="weight_scale_inv")
    cpu = torch.device("cpu")
    options = LayerOptions(
        group=TensorParallelGroup(rank=0, world_size=1, device=cpu, process_group=None),
        dtype=torch.float32,
        device=cpu,
        batch_invariant=False,
        linear_method=QuantizedMethod(QuantizationConfig(weights=config), TensorNames()),
    )
    places = [(1, 10), (12, 9), (23, 1)]
    parts = [
        ColumnPart(name="qkv", full_size=24, local_size=count, start=start, section=12)
        for start, count in places
    ]
    stored = {
        "qkv.weight": torch.randn(24, 16).to(torch.float8_e4m3fn),
        "qkv.weight_scale_inv": torch.rand(4, 2),
    }
    layer = ColumnParallelLinear(16, parts, bias=False, options=options)
    for slot in layer.weight_slots(""):
        source = stored[slot.name]
        assert slot.full_shape == source.shape
        rows = slot.destination.shape[0]
        slot.destination.copy_(source[slot.start : slot.start + rows])
    scales = stored["qkv.weight_scale_inv"].repeat_interleave(8, 1).view(2, 2, 16)
    scales = scales.repeat_interleave(8, 1)[:, :12].reshape(24, 16)
    expected = stored["qkv.weight"].float() * scales
    own = torch.cat([expected[start : start + count] for start, count in places])
    torch.testing.assert_close(layer.weight.dense(), own)
