"""LoRA adapters with random weights, in PEFT's format, and models with adapters merged in."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
EMBEDDING_ENDS = ".lora_embedding_A", ".lora_embedding_B"
"""Suffixes of the names of an embedding's tensors."""
_STRENGTH = 0.05
"""Standard deviation of an adapter's output for an input of ones, per input feature. It is several
times that of tiny models' weights, so that tokens differ."""


def write_adapter(
    base: Path,
    folder: Path,
    rank: int,
    *,
    targets: Sequence[str] = TARGETS,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """Saves an adapter of the checkpoint `base`; returns its folder.

    Args:
        base: folder of the model.
        folder: target folder.
        rank: rank of all modules.
        targets: names of the adapted projections, or suffixes of them.
        seed: random seed of the weights.
        dtype: data type of the weights.
        config: other keys of adapter_config.json.
    """
    generator = torch.Generator().manual_seed(seed)
    settings = {"r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets), **config}
    scale = settings["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
    tensors = {}
    for name, weight in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if weight.ndim == 2 and (module in targets or module.rsplit(".", 1)[-1] in targets):
            out_size, in_size = weight.shape
            first = torch.randn(rank, in_size, generator=generator)
            second = torch.randn(out_size, rank, generator=generator)
            second *= _STRENGTH / scale / math.sqrt(rank)
            ends = ".lora_A.weight", ".lora_B.weight"
            if module.endswith("embed_tokens"):
                ends = EMBEDDING_ENDS
                first, second = second.t().contiguous(), first.t().contiguous()
            for end, factor in zip(ends, (first, second), strict=True):
                tensors[f"base_model.model.{module}{end}"] = factor.to(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings |= {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def merge_adapter(base: Path, adapter: Path, folder: Path) -> Path:
    """Saves the checkpoint `base` with the weights W + scale * B A, as PEFT's `merge_and_unload`;
    returns its folder."""
    shutil.copytree(base, folder)
    config = json.loads((adapter / "adapter_config.json").read_text())
    weights = load_file(base / "model.safetensors")
    factors = load_file(adapter / "adapter_model.safetensors")
    for name, first in factors.items():
        if not name.endswith((".lora_A.weight", EMBEDDING_ENDS[0])):
            continue
        rank = config["r"]
        scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
        second = factors[name.replace("_A", "_B")]
        product = scale * (second.float() @ first.float())
        merged = name.removeprefix("base_model.model.").replace(".lora_A", "")
        if name.endswith(EMBEDDING_ENDS[0]):
            merged = merged.replace(EMBEDDING_ENDS[0], ".weight")
            product = product.t()
        weights[merged] = weights[merged] + product
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder
