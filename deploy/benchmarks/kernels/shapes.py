"""Configurations of known models, for benchmarks with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "eos_token_id": 151645,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        **_QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "qwen3-0.6b": {
        **_QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
}
"""config.json fields of text models, keyed by short name."""
BLOCK_SHAPES: dict[str, dict[str, Any]] = {
    "llada2-mini": {
        "architectures": ["LLaDA2MoeModelLM"],
        "model_type": "llada2_moe",
        "vocab_size": 157184,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_hidden_layers": 20,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 600000,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 32768,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "block_size": 32,
        "mask_token_id": 156895,
        "eos_token_id": 156892,
        "tie_word_embeddings": False,
    },
}
"""config.json fields of block-diffusion models, keyed by short name."""


def write_shape(name: str, directory: str) -> str:
    """Creates a folder in `directory` that contains only the model's config.json; returns its
    path."""
    folder = Path(directory) / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**SHAPES, **BLOCK_SHAPES}[name]))
    return str(folder)
