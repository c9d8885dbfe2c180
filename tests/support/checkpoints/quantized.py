"""Tiny mixtures of experts in every layout of quantized weights, and their dequantized
counterparts.

Codes are random. They are packed element by element by each layout's rules and dequantized here,
without sharing code with the loader.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.support.checkpoints.moe import QWEN3_MOE, write_moe

GROUP = 24
"""Group size that divides neither the checkpoint's dimensions nor their shards."""
CONFIG: dict[str, Any] = {**QWEN3_MOE, "num_hidden_layers": 1, "num_experts": 4}
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

Quantized = tuple[dict[str, torch.Tensor], torch.Tensor]
"""Tensors of a module, keyed by name suffix, and the dequantized weight [N, K]."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A layout of quantized weights."""

    settings: Mapping[str, Any]
    """quantization_config of the layout."""
    draw: Callable[[int, int], Quantized]
    """Creates a random weight [N, K]."""
    file: str = ""
    """File with the quantization_config; empty for config.json."""


def write_quantized(
    layout: Layout,
    folder: Path,
    dequantized: Path,
    left_out: str = "^$",
    *,
    other: tuple[str, Layout] | None = None,
    **settings: Any,
) -> None:
    """Writes a mixture of experts, quantized and dequantized.

    Args:
        layout: layout of the quantized weights.
        folder: folder of the quantized checkpoint.
        dequantized: folder of the dequantized checkpoint.
        left_out: pattern of the names of modules that are not quantized.
        other: pattern of the names of modules with another layout, and that layout.
        settings: additional keys of quantization_config.
    """
    torch.manual_seed(7)
    plain = dict(write_moe(CONFIG, dequantized).weights)
    tensors = dict(plain)
    for key in [key for key in plain if key.endswith("_proj.weight")]:
        name = key.removesuffix(".weight")
        if not re.search(left_out, name):
            del tensors[key]
            is_other = other is not None and re.search(other[0], name)
            draw = other[1].draw if other is not None and is_other else layout.draw
            own, values = draw(*plain[key].shape)
            plain[key] = values.float()
            tensors |= {f"{name}.{end}": tensor for end, tensor in own.items()}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(plain, dequantized / "model.safetensors", metadata={"format": "pt"})
    config, format_ = dict(CONFIG), {**layout.settings, **settings}
    if layout.file:
        (folder / layout.file).write_text(json.dumps(format_))
    else:
        config["quantization_config"] = format_
    (folder / "config.json").write_text(json.dumps(config))


def _pack(values: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """int32 words [rows, columns / n] of numbers [rows, columns]. The i-th of n neighbors is in
    field `order[i]`, by default i."""
    count = 32 // bits
    words = torch.zeros(values.shape[0], values.shape[1] // count, dtype=torch.int64)
    for place, number in enumerate(order or range(count)):
        words |= values[:, place::count].long() << (bits * number)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _groups(columns: int, group: int = GROUP) -> torch.Tensor:
    return torch.arange(columns) // group


def _scales(*shape: int) -> torch.Tensor:
    return torch.rand(shape) * 0.02 + 0.005


def awq(rows: int, columns: int) -> Quantized:
    codes, groups = torch.randint(16, (rows, columns)), _groups(columns)
    count = int(groups[-1]) + 1
    zeros, scales = torch.randint(16, (rows, count)), _scales(rows, count).half()
    order = (0, 4, 1, 5, 2, 6, 3, 7)
    tensors = {
        "qweight": _pack(codes.T, 4, order),
        "qzeros": _pack(zeros.T, 4, order),
        "scales": scales.T.contiguous(),
    }
    return tensors, (codes - zeros[:, groups]) * scales.float()[:, groups]


def gptq(
    rows: int, columns: int, bits: int = 4, less: int = 1, is_ordered: bool = True
) -> Quantized:
    largest = 2**bits
    codes, groups = torch.randint(largest, (rows, columns)), _groups(columns)
    count = int(groups[-1]) + 1
    if not is_ordered:
        groups = groups[torch.randperm(columns)]
    zeros = torch.randint(1, largest, (rows, count))
    scales = (_scales(rows, count) * 16 / largest).half()
    tensors = {
        "qweight": _pack(codes, bits).T.contiguous(),
        "qzeros": _pack(zeros.T - less, bits),
        "scales": scales.T.contiguous(),
        "g_idx": groups.to(torch.int32),
    }
    return tensors, (codes - zeros[:, groups]) * scales.float()[:, groups]


def compressed(rows: int, columns: int, bits: int = 4, zeros: bool = False) -> Quantized:
    largest, middle = 2**bits, 2 ** (bits - 1)
    groups = _groups(columns) if zeros else _groups(columns, 16)
    count = int(groups[-1]) + 1
    codes = torch.randint(-middle, middle, (rows, columns))
    points = torch.randint(-middle, middle, (rows, count)) * int(zeros)
    scales = (_scales(rows, count) * 16 / largest).bfloat16()
    tensors = {
        "weight_packed": _pack(codes + middle, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor([rows, columns]),
    }
    if zeros:
        tensors["weight_zero_point"] = _pack((points + middle).T, bits).T.contiguous()
    return tensors, (codes - points[:, groups]) * scales.float()[:, groups]


def fp8(rows: int, columns: int, scale: torch.Tensor, end: str = "weight_scale") -> Quantized:
    """Random e4m3 weights with per-tensor or per-row scales."""
    values = torch.randn(rows, columns).mul_(50).to(torch.float8_e4m3fn)
    scale = scale * 0.01
    wide = scale.reshape(-1, 1) if scale.numel() > 1 else scale.reshape(1, 1)
    tensors = {"weight": values, end: scale, "input_scale": torch.tensor(0.5)}
    if end == "weight_scale_inv":
        tensors["activation_scale"] = tensors.pop("input_scale")
    return tensors, values.float() * wide


def int8(rows: int, columns: int) -> Quantized:
    codes, scale = torch.randint(-127, 128, (rows, columns)), _scales(rows, 1) * 0.1
    return {"weight": codes.to(torch.int8), "weight_scale": scale}, codes * scale


def _e2m1(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes [rows, columns / 2], and the values that they encode."""
    codes = torch.randint(16, (rows, columns))
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
    return (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8), table[codes]


def nvfp4(rows: int, columns: int, modelopt: bool = True) -> Quantized:
    packed, values = _e2m1(rows, columns)
    groups = _groups(columns, 16)
    scales = (torch.rand(rows, columns // 16) * 300 + 20).to(torch.float8_e4m3fn)
    whole = torch.tensor(0.0003) if modelopt else torch.tensor([3000.0])
    wide = scales.double()[:, groups] * (whole.double() if modelopt else 1 / whole.double())
    names = ("weight", "weight_scale_2", "input_scale")
    if not modelopt:
        names = ("weight_packed", "weight_global_scale", "input_global_scale")
    tensors = {names[0]: packed, names[1]: whole, names[2]: torch.ones(1), "weight_scale": scales}
    return tensors, values * wide


def _exponents(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Stored exponents of the scales per 32 columns, and the scale of each column."""
    exponents = torch.randint(118, 122, (rows, columns // 32))
    return exponents.to(torch.uint8), 2.0 ** (exponents - 127)[:, _groups(columns, 32)]


def mxfp8(rows: int, columns: int, end: str = "weight_scale_inv") -> Quantized:
    values = torch.randn(rows, columns).mul_(50).to(torch.float8_e4m3fn)
    exponents, scales = _exponents(rows, columns)
    return {"weight": values, end: exponents}, values.float() * scales


def mxfp4(rows: int, columns: int) -> Quantized:
    packed, values = _e2m1(rows, columns)
    exponents, scales = _exponents(rows, columns)
    return {"weight_packed": packed, "weight_scale": exponents}, values * scales


def compressed_config(format_: str, **weights: Any) -> dict[str, Any]:
    """quantization_config of compressed-tensors for a format."""
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "symmetric": True, **weights}}
    own = {"input_activations": {"num_bits": 8, "dynamic": True}, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format_,
        "config_groups": {"group_0": {**group, **own}},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "quantization_status": "compressed",
    }


_FLOAT_8 = {"num_bits": 8, "type": "float"}
_INT = {"type": "int", "strategy": "group", "group_size": GROUP}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
_INDEXED = {**_GPTQ, "desc_act": True}

LAYOUTS: Mapping[str, Layout] = {
    "awq": Layout(settings={**_AWQ, "version": "gemm"}, draw=awq),
    "gptq": Layout(settings=_GPTQ, draw=gptq, file="quantize_config.json"),
    "gptq-v2": Layout(
        settings={**_GPTQ, "checkpoint_format": "gptq_v2"}, draw=partial(gptq, less=0)
    ),
    "gptq-8": Layout(settings={**_GPTQ, "bits": 8}, draw=partial(gptq, bits=8)),
    "gptq-index": Layout(settings=_INDEXED, draw=partial(gptq, is_ordered=False)),
    "gptq-index-8": Layout(
        settings={**_INDEXED, "bits": 8, "checkpoint_format": "gptq_v2"},
        draw=partial(gptq, bits=8, less=0, is_ordered=False),
    ),
    "int4": Layout(
        settings=compressed_config("pack-quantized", **{**_INT, "group_size": 16}), draw=compressed
    ),
    "int4-zeros": Layout(
        settings=compressed_config("pack-quantized", **_INT, **{"symmetric": False}),
        draw=partial(compressed, zeros=True),
    ),
    "int8-packed": Layout(
        settings=compressed_config("pack-quantized", **{**_INT, "group_size": 16, "num_bits": 8}),
        draw=partial(compressed, bits=8),
    ),
    "int8": Layout(
        settings=compressed_config("int-quantized", type="int", num_bits=8, strategy="channel"),
        draw=int8,
    ),
    "fp8-tensor": Layout(
        settings={"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        draw=lambda rows, columns: fp8(rows, columns, torch.rand(()) + 0.5, "weight_scale_inv"),
    ),
    "fp8-tensor-of-one": Layout(
        settings={"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}},
        draw=lambda rows, columns: fp8(rows, columns, torch.rand(1) + 0.5),
        file="hf_quant_config.json",
    ),
    "fp8-channel": Layout(
        settings=compressed_config("float-quantized", **_FLOAT_8, strategy="channel"),
        draw=lambda rows, columns: fp8(rows, columns, torch.rand(rows, 1) + 0.5),
    ),
    "fp8-channel-of-rows": Layout(
        settings={"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        draw=lambda rows, columns: fp8(rows, columns, torch.rand(rows) + 0.5),
    ),
    "mxfp8": Layout(
        settings={
            "quant_method": "mxfp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [1, 32],
        },
        draw=mxfp8,
    ),
    "mxfp8-modelopt": Layout(
        settings={"quant_method": "modelopt", "quant_algo": "MXFP8"},
        draw=partial(mxfp8, end="weight_scale"),
    ),
    "nvfp4": Layout(
        settings={"quantization": {"quant_algo": "NVFP4", "group_size": 16}},
        draw=nvfp4,
        file="hf_quant_config.json",
    ),
    "nvfp4-compressed": Layout(
        settings=compressed_config(
            "nvfp4-pack-quantized", type="float", strategy="tensor_group", group_size=16
        ),
        draw=partial(nvfp4, modelopt=False),
    ),
    "mxfp4": Layout(
        settings=compressed_config(
            "mxfp4-pack-quantized", type="float", strategy="group", group_size=32
        ),
        draw=mxfp4,
    ),
}
