"""Checkpoints with an MTP head that predicts nearly as well as the model, by construction.

The head repeats the model's last layers; earlier layers, with states, add little. Embeddings have
unit norm. The head's projection passes the next token's embedding through, so at each position, the
head computes what the model computes at the next one, except for the first token. Its predictions
depend on its own KV cache.
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
from worker.models.config.model_config import ModelConfig, load_model_config

_ONE_LAYER: Mapping[str, Any] = {"num_hidden_layers": 1}
_WITH_STATES: Mapping[str, Any] = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
}
_SMALL = 0.01
"""Factor for the outputs of layers that the head does not repeat."""
_OUTPUTS = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
"""Name suffixes of the blocks' last projections."""
_ONE_SPARSE_LAYER: Mapping[str, Any] = {**_ONE_LAYER, "first_k_dense_replace": 0}
_ONE_INDEXER: Mapping[str, Any] = {**_ONE_SPARSE_LAYER, "mlp_layer_types": ["sparse"]}


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
    "deepseek-v3.2": _of("deepseek-v3.2", _ONE_INDEXER),
    "glm-5": _of("glm-5", {**_ONE_INDEXER, "indexer_types": ["full"]}),
    "ernie4-5-moe": _of(
        "ernie4-5-moe", {**_ONE_LAYER, "moe_layer_start_index": 1, "moe_layer_end_index": 1}
    ),
    "mimo-v2": _of(
        "mimo-v2",
        {
            "num_hidden_layers": 2,
            "layer_types": ["full_attention", "sliding_attention"],
            "mlp_layer_types": ["sparse", "dense"],
        },
    ),
    "longcat": _of("longcat", {"num_hidden_layers": 2, "routed_scaling_factor": _SMALL}),
    "nemotron-3": _of(
        "nemotron-3",
        {
            "num_hidden_layers": 3,
            "layers_block_type": ["linear_attention", "full_attention", "moe"],
            "mtp_layers_block_type": ["attention", "moe"],
        },
    ),
    "step3p5": _of(
        "step3p5",
        {
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "mlp_layer_types": ["sparse", "dense"],
            "swiglu_limits": [0.4, 0.0],
            "swiglu_limits_shared": [None, 0.0],
        },
    ),
}
_STORED_LESS_ONE = ("qwen3-5", "qwen3-next", "step3p5")
"""Families whose checkpoints store norm weights minus 1."""


def _repeated(name: str, config: ModelConfig, layer: str) -> Mapping[str, str]:
    """Prefixes of the model's tensors that the head repeats, and of the head's own; the first match
    is used."""
    last = f"model.layers.{config.num_layers - 1}."
    match name:
        case "nemotron-3":
            return {"backbone.layers.1.": f"{layer}0.", "backbone.layers.2.": f"{layer}1."}
        case "mimo-v2":
            norm = "post_attention_layernorm."
            return {f"{last}{norm}": f"{layer}pre_mlp_layernorm.", last: layer}
        case "longcat":
            return {
                **{
                    f"model.layers.0.{norm}.0.": f"{layer}{norm}."
                    for norm in ("input_layernorm", "post_attention_layernorm")
                },
                "model.layers.0.self_attn.0.": f"{layer}self_attn.",
                "model.layers.0.mlps.0.": f"{layer}transformer_layer.mlp.",
            }
        case _:
            return {last: layer}


def write_with_head(name: str, folder: Path) -> Path:
    """Writes one of HEADS; returns the folder."""
    write(HEADS[name], folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    config = load_model_config(str(folder))
    mtp = config.mtp
    assert mtp is not None, "the family has heads"
    repeated = _repeated(name, config, mtp.layer)
    for key, tensor in tensors.items():
        if key.endswith(_OUTPUTS) and not key.startswith(tuple(repeated)):
            tensor *= _SMALL
    embedding = _first(tensors, "model.embed_tokens.weight", "backbone.embeddings.weight")
    embedding /= embedding.square().mean(-1, keepdim=True).sqrt()
    size = embedding.shape[1]
    halves = [torch.eye(size), 0.001 * torch.randn(size, size)]
    if mtp.hidden_first:
        halves.reverse()
    ones = torch.zeros(size) if name in _STORED_LESS_ONE else torch.ones(size)
    head = {
        own + key.removeprefix(prefix): tensor.clone()
        for key, tensor in tensors.items()
        for prefix, own in [_match(key, repeated)]
        if prefix
    }
    head[f"{mtp.embedding_norm}.weight"] = ones
    head[f"{mtp.hidden_norm}.weight"] = ones.clone()
    head[f"{mtp.projection}.weight"] = torch.cat(halves, dim=1)
    norm = _first(tensors, "model.norm.weight", "backbone.norm_f.weight")
    head[f"{mtp.final_norm}.weight"] = norm.clone()
    if mtp.lm_head:
        head[f"{mtp.lm_head}.weight"] = tensors["lm_head.weight"].clone()
    for key in mtp.skipped:
        head[f"{key.removesuffix('.')}.weight"] = embedding.clone()
    save_file({**tensors, **head}, file, metadata={"format": "pt"})
    return folder


def write_chain(folder: Path, count: int) -> Path:
    """Writes Step 3.5 with `count` heads, all nearly as good as the model; returns the folder.

    The first head adds noise to its input for hidden dimensions whose weights in the final norm are
    zero: none in the model's hidden states, but in outputs of heads. It thus cannot continue from
    its own outputs, while further heads, which ignore these, can.
    """
    write_with_head("step3p5", folder)
    file, config = folder / "model.safetensors", load_model_config(str(folder))
    mtp, tensors = config.mtp, load_file(file)
    assert mtp is not None, "the family has heads"
    for norm in ("model.norm.weight", f"{mtp.final_norm}.weight"):
        tensors[norm][::4] = -1.0  # stored less one
    further = {
        key.replace(mtp.layer, f"model.layers.{config.num_layers + number}."): tensor.clone()
        for key, tensor in tensors.items()
        for number in range(1, count)
        if key.startswith(mtp.layer)
    }
    noise = tensors[f"{mtp.projection}.weight"][:, config.hidden_size :]
    noise[:, ::4] = torch.randn(noise[:, ::4].shape)
    save_file({**tensors, **further}, file, metadata={"format": "pt"})
    _set_heads(folder, count)
    return folder


def _set_heads(folder: Path, count: int) -> None:
    """Sets the number of heads in config.json of Step 3.5."""
    config = json.loads((folder / "config.json").read_text())
    size = config["num_hidden_layers"]
    lists = {
        key: [*value[: size + 1], *[value[size]] * (count - 1)]
        for key, value in config.items()
        if isinstance(value, list) and len(value) > size
    }
    with_keys(folder, num_nextn_predict_layers=count, **lists)


def _first(tensors: Mapping[str, torch.Tensor], *names: str) -> torch.Tensor:
    return next(tensors[name] for name in names if name in tensors)


def _match(key: str, prefixes: Mapping[str, str]) -> tuple[str, str]:
    """First matching prefix of a name, and its replacement; empty if there is none."""
    found = (pair for pair in prefixes.items() if key.startswith(pair[0]))
    return next(found, ("", ""))


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
