"""Tiny checkpoints with block-wise FP8 weights, and their dequantized counterparts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tests.support.checkpoints.dense import write_checkpoint
from tests.support.checkpoints.moe import write_moe

BLOCK = (16, 48)
"""Block size that divides neither all dimensions of the checkpoints nor their shards."""
QUANTIZATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": list(BLOCK),
    "modules_to_not_convert": [
        "lm_head",
        "model.layers.0.input_layernorm",
        "model.layers.0.mlp.gate",
    ],
}


def write_fp8(name: str, folder: Path, dequantized: Path) -> PreTrainedModel:
    """Writes both checkpoints; returns the transformers model of the dequantized one."""
    model = write_checkpoint(name, folder)
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
        path.unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    state = model.state_dict()
    for key in [key for key in tensors if key.endswith("_proj.weight")]:
        values, scales = quantize(tensors[key])
        tensors[key], tensors[f"{key}_scale_inv"] = values, scales
        state[key].copy_(dequantize(values, scales))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTIZATION}))
    model.save_pretrained(dequantized)
    return model


def write_fp8_moe(config: dict[str, Any], folder: Path, dequantized: Path) -> None:
    """Writes both checkpoints of a mixture of experts."""
    weights = write_moe(config, folder).weights
    tensors, plain = dict(weights), dict(weights)
    for key in [key for key in weights if re.search(r"(_proj|_key_value|dense)\.weight$", key)]:
        values, scales = quantize(weights[key])
        tensors[key], tensors[f"{key}_scale_inv"] = values, scales
        plain[key] = dequantize(values, scales)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTIZATION}))
    write_moe(config, dequantized)
    save_file(plain, dequantized / "model.safetensors", metadata={"format": "pt"})


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values [N, K] in e4m3, and the scales of their blocks."""
    rows, columns = (-(-size // block) for size, block in zip(weight.shape, BLOCK, strict=True))
    scales = torch.empty(rows, columns)
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for row in range(rows):
        for column in range(columns):
            block = _block(row, column)
            scales[row, column] = weight[block].abs().max() / 448.0
            values[block] = (weight[block] / scales[row, column]).to(values.dtype)
    return values, scales


def dequantize(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Weight [N, K] in fp32, computed block by block."""
    weight = torch.empty(values.shape)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            block = _block(row, column)
            weight[block] = values[block].float() * scales[row, column]
    return weight


def _block(row: int, column: int) -> tuple[slice, slice]:
    return (
        slice(row * BLOCK[0], (row + 1) * BLOCK[0]),
        slice(column * BLOCK[1], (column + 1) * BLOCK[1]),
    )
