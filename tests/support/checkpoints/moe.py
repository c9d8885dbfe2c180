"""Tiny mixtures of experts in their released formats, and plain torch references written from their
descriptions.

The reference computes every expert for every token. Names, shapes and numbers come from the
published checkpoints' config.json and index files, not from the code under test.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.support.checkpoints.reference import Scores

MASK = 90
_COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "mask_token_id": MASK,
    "eos_token_id": 2,
}
SDAR_MOE: dict[str, Any] = {
    **_COMMON,
    "architectures": ["SDARMoeForCausalLM"],
    "model_type": "sdar_moe",
    "block_size": 4,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
QWEN3_MOE: dict[str, Any] = {
    **{key: value for key, value in _COMMON.items() if key != "mask_token_id"},
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
LLADA2: dict[str, Any] = {
    **_COMMON,
    "architectures": ["LLaDA2MoeModelLM"],
    "model_type": "llada2_moe",
    "block_size": 8,
    "first_k_dense_replace": 1,
    "partial_rotary_factor": 0.5,
    "rotary_dim": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "use_qkv_bias": False,
    "use_bias": False,
    "use_qk_norm": True,
}
LLADA2_2: dict[str, Any] = {
    **LLADA2,
    "num_hidden_layers": 3,
    "expert_capacity": 4,
    "delete_token_id": 91,
    "split_token_id": 92,
}
BAILING: dict[str, Any] = {
    **{key: LLADA2[key] for key in LLADA2 if key not in ("block_size", "mask_token_id")},
    "architectures": ["BailingMoeV2ForCausalLM"],
    "model_type": "bailing_moe",
    "vocab_size": 97,
    "eos_token_id": 7,
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 2,
}
_LING = ("llada2_moe", "bailing_moe")
"""Families with Ling's names and router."""


@dataclass
class MoeCheckpoint:
    folder: str
    config: dict[str, Any]
    weights: dict[str, torch.Tensor]

    def __call__(self, input_ids: torch.Tensor) -> Scores:
        """Logits after each token of `input_ids` [1, tokens]."""
        return Scores(reference_logits(self, input_ids[0].tolist())[None])


@dataclass(frozen=True)
class MoeMathematics:
    """Reference for a family's configuration, computed by this module."""

    config: Mapping[str, Any]
    """Content of config.json."""

    def write(self, folder: Path) -> MoeCheckpoint:
        """Saves a checkpoint with random weights and returns its reference model."""
        return write_moe(dict(self.config), folder)


def write_moe(config: dict[str, Any], folder: Path) -> MoeCheckpoint:
    generator = torch.Generator().manual_seed(5)
    weights = {}
    for name, shape in _shapes(config).items():
        value = torch.randn(shape, generator=generator)
        if name.endswith("expert_bias"):
            weights[name] = 0.3 * value
        elif len(shape) == 1:
            weights[name] = 1.0 + 0.2 * value
        else:
            weights[name] = value * shape[-1] ** -0.5 * (2.0 if "lm_head" in name else 1.0)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return MoeCheckpoint(str(folder), config, weights)


def _shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, dim, llada = c["hidden_size"], c["head_dim"], c["model_type"] in _LING
    q, kv = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
    embedding = "word_embeddings" if llada else "embed_tokens"
    shapes: dict[str, tuple[int, ...]] = {
        f"model.{embedding}.weight": (c["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (c["vocab_size"], hidden),
    }

    def mlp(prefix: str, size: int) -> None:
        shapes[f"{prefix}.gate_proj.weight"] = shapes[f"{prefix}.up_proj.weight"] = (size, hidden)
        shapes[f"{prefix}.down_proj.weight"] = (hidden, size)

    for index in range(c["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        if llada:
            shapes[f"{layer}.attention.query_key_value.weight"] = (q + 2 * kv, hidden)
            shapes[f"{layer}.attention.dense.weight"] = (hidden, q)
            shapes[f"{layer}.attention.query_layernorm.weight"] = (dim,)
            shapes[f"{layer}.attention.key_layernorm.weight"] = (dim,)
        else:
            for name, size in (("q", q), ("k", kv), ("v", kv)):
                shapes[f"{layer}.self_attn.{name}_proj.weight"] = (size, hidden)
            shapes[f"{layer}.self_attn.o_proj.weight"] = (hidden, q)
            shapes[f"{layer}.self_attn.q_norm.weight"] = (dim,)
            shapes[f"{layer}.self_attn.k_norm.weight"] = (dim,)
        if index < c.get("first_k_dense_replace", 0):
            mlp(f"{layer}.mlp", c["intermediate_size"])
            continue
        shapes[f"{layer}.mlp.gate.weight"] = (c["num_experts"], hidden)
        for expert in range(c["num_experts"]):
            mlp(f"{layer}.mlp.experts.{expert}", c["moe_intermediate_size"])
        if llada:
            shapes[f"{layer}.mlp.gate.expert_bias"] = (c["num_experts"],)
            size = c["num_shared_experts"] * c["moe_intermediate_size"]
            mlp(f"{layer}.mlp.shared_experts", size)
    return shapes


def reference_logits(checkpoint: MoeCheckpoint, token_ids: Sequence[int]) -> torch.Tensor:
    """Logits [positions, vocab] of whole blocks with block-causal attention."""
    c, w = checkpoint.config, checkpoint.weights
    llada = c["model_type"] in _LING
    hidden = w["model.word_embeddings.weight" if llada else "model.embed_tokens.weight"]
    x = hidden[list(token_ids)]
    blocks = torch.arange(len(token_ids)) // c.get("block_size", 1)
    hides = blocks[:, None] < blocks[None, :]
    for index in range(c["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        normed = _norm(x, w[f"{layer}.input_layernorm.weight"])
        x = x + _attention(c, w, layer, normed, hides, llada)
        normed = _norm(x, w[f"{layer}.post_attention_layernorm.weight"])
        if f"{layer}.mlp.gate.weight" in w:
            x = x + _experts(c, w, f"{layer}.mlp", normed, llada)
        else:
            x = x + _mlp(w, f"{layer}.mlp", normed)
    return _norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].T


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def _mlp(w: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    gate = x @ w[f"{name}.gate_proj.weight"].T
    up = x @ w[f"{name}.up_proj.weight"].T
    return (gate * gate.sigmoid() * up) @ w[f"{name}.down_proj.weight"].T


def _attention(
    c: dict[str, Any],
    w: dict[str, torch.Tensor],
    layer: str,
    x: torch.Tensor,
    hides: torch.Tensor,
    llada: bool,
) -> torch.Tensor:
    heads, kv_heads, dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    if llada:
        qkv = x @ w[f"{layer}.attention.query_key_value.weight"].T
        names = ("attention.query_layernorm", "attention.key_layernorm", "attention.dense")
    else:
        qkv = torch.cat([x @ w[f"{layer}.self_attn.{n}_proj.weight"].T for n in "qkv"], -1)
        names = ("self_attn.q_norm", "self_attn.k_norm", "self_attn.o_proj")
    q, k, v = qkv.view(len(x), -1, dim).split([heads, kv_heads, kv_heads], 1)
    rotated = c.get("rotary_dim", dim)
    q = _rotate(_norm(q, w[f"{layer}.{names[0]}.weight"]), rotated, c["rope_theta"])
    k = _rotate(_norm(k, w[f"{layer}.{names[1]}.weight"]), rotated, c["rope_theta"])
    group = heads // kv_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * dim**-0.5
    shares = scores.masked_fill(hides, -torch.inf).softmax(-1)
    out = torch.einsum("hqk,khd->qhd", shares, v).flatten(1)
    return out @ w[f"{layer}.{names[2]}.weight"].T


def _rotate(x: torch.Tensor, rotated: int, theta: float) -> torch.Tensor:
    turning, rest = x[..., :rotated], x[..., rotated:]
    speeds = theta ** (-torch.arange(0, rotated, 2) / rotated)
    angles = (torch.arange(len(x))[:, None] * speeds)[:, None]
    a, b = turning.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


def _experts(
    c: dict[str, Any], w: dict[str, torch.Tensor], name: str, x: torch.Tensor, llada: bool
) -> torch.Tensor:
    scores = x @ w[f"{name}.gate.weight"].T
    out = torch.zeros_like(x)
    capacity, block_size = c.get("expert_capacity"), c.get("block_size", 1)
    for token in range(len(x)):
        shares = scores[token].sigmoid() if llada else scores[token].softmax(-1)
        ranking = shares.clone()
        if llada:
            ranking += w[f"{name}.gate.expert_bias"]
        if llada and capacity is not None:
            first = token // block_size * block_size
            block = scores[first : first + block_size].sigmoid() + w[f"{name}.gate.expert_bias"]
            best = block.max(0).values
            for expert in range(c["num_experts"]):
                if int((best > best[expert]).sum()) >= capacity:
                    ranking[expert] = -torch.inf
        elif llada:
            size = c["num_experts"] // c["n_group"]
            sums = [
                (sum(sorted(group.tolist())[-2:]), index)
                for index, group in enumerate(ranking.split(size))
            ]
            kept = [index for _, index in sorted(sums)[-c["topk_group"] :]]
            for index in range(c["n_group"]):
                if index not in kept:
                    ranking[index * size : (index + 1) * size] = -torch.inf
        chosen = ranking.topk(c["num_experts_per_tok"]).indices.tolist()
        total = sum(float(shares[expert]) for expert in chosen)
        for expert in chosen:
            weight = float(shares[expert]) / total * c.get("routed_scaling_factor", 1.0)
            out[token] += weight * _mlp(w, f"{name}.experts.{expert}", x[token])
    return out + _mlp(w, f"{name}.shared_experts", x) if llada else out
