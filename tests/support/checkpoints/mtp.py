"""Checkpoints with an MTP head that predicts nearly as well as the model, by construction.

The head repeats the model's last layer; earlier ones, with states, add little. Embeddings have norm
1. The head's projection passes on the next token's embedding, so at each position the head computes
what the model does at the next one, but for the first token. Its predictions depend on its own KV
cache.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints.families import SPECIMENS
from tests.support.checkpoints.specimen import Specimen, write
from worker.models.config.model_config import load_model_config

_ONE_LAYER: Mapping[str, Any] = {"num_hidden_layers": 1}
_WITH_STATES: Mapping[str, Any] = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
}
_SMALL = 0.01
"""Factor of the outputs of layers before the last."""
_ONE_SPARSE_LAYER: Mapping[str, Any] = {**_ONE_LAYER, "first_k_dense_replace": 0}


def _mimo(config: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in config.items() if key != "layer_types"}
    return {**kept, "model_type": "mimo"}


def _of(name: str, settings: Mapping[str, Any]) -> Specimen:
    specimen = SPECIMENS[name]
    return replace(specimen, settings={**specimen.settings, **settings})


HEADS: Mapping[str, Specimen] = {
    "glm4-moe": _of("glm4-moe", _ONE_SPARSE_LAYER),
    "deepseek-v3": _of("deepseek-v3", _ONE_SPARSE_LAYER),
    "hy3": _of("hy3", {**_ONE_LAYER, "mlp_layer_types": ["sparse"]}),
    "mimo": Specimen(
        name="Qwen2",
        settings={**_ONE_LAYER, "max_window_layers": 1},
        architecture="MiMoForCausalLM",
        rewrite_config=_mimo,
    ),
    "qwen3": Specimen(name="Qwen3", settings=_ONE_LAYER),
    "qwen3-5": _of("qwen3-5", _WITH_STATES),
    "qwen3-next": _of(
        "qwen3-next", {**_WITH_STATES, "mlp_only_layers": [], "decoder_sparse_step": 1}
    ),
}


def write_with_head(name: str, folder: Path) -> Path:
    """Writes one of HEADS; returns the folder."""
    write(HEADS[name], folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    config = load_model_config(str(folder))
    mtp = config.mtp
    assert mtp is not None, "the family has heads"
    last = f"model.layers.{config.num_layers - 1}."
    for key, tensor in tensors.items():
        if key.endswith(("out_proj.weight", "down_proj.weight")) and not key.startswith(last):
            tensor *= _SMALL
    embedding = tensors["model.embed_tokens.weight"]
    embedding /= embedding.square().mean(-1, keepdim=True).sqrt()
    size = embedding.shape[1]
    halves = [torch.eye(size), 0.001 * torch.randn(size, size)]
    if mtp.hidden_first:
        halves.reverse()
    # Norms of families with states are stored less one.
    ones = torch.zeros(size) if config.linear_layers else torch.ones(size)
    head = {
        mtp.layer + key.removeprefix(last): tensor.clone()
        for key, tensor in tensors.items()
        if key.startswith(last)
    }
    head[f"{mtp.embedding_norm}.weight"] = ones
    head[f"{mtp.hidden_norm}.weight"] = ones.clone()
    head[f"{mtp.projection}.weight"] = torch.cat(halves, dim=1)
    head[f"{mtp.final_norm}.weight"] = tensors["model.norm.weight"].clone()
    for key in mtp.skipped:
        head[f"{key}weight"] = embedding.clone()
    save_file({**tensors, **head}, file, metadata={"format": "pt"})
    return folder


def without_head(folder: Path) -> None:
    """Removes the head's projection."""
    file = folder / "model.safetensors"
    mtp = load_model_config(str(folder)).mtp
    assert mtp is not None, "the family has heads"
    tensors = load_file(file)
    del tensors[f"{mtp.projection}.weight"]
    save_file(tensors, file, metadata={"format": "pt"})


def with_keys(folder: Path, **keys: Any) -> None:
    """Changes keys of config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))
