"""Tiny random checkpoints of every architecture, written by transformers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB_SIZE = 509
EOS = [7, 11]


@dataclass(frozen=True)
class Spec:
    config_class: type
    model_class: type[PreTrainedModel]
    settings: dict[str, Any] = field(default_factory=dict)
    shard_size: str = "50GB"


_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
}

SPECS = {
    "llama": Spec(
        LlamaConfig,
        LlamaForCausalLM,
        {"rope_parameters": _LLAMA3, "attention_bias": True, "mlp_bias": True},
        shard_size="200KB",
    ),
    "llama-tied": Spec(
        LlamaConfig,
        LlamaForCausalLM,
        {
            "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
            "tie_word_embeddings": True,
            "head_dim": None,
        },
    ),
    "granite": Spec(
        GraniteConfig,
        GraniteForCausalLM,
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.125,
            "residual_multiplier": 0.5,
            "logits_scaling": 0.25,
            "tie_word_embeddings": True,
        },
    ),
    "mistral": Spec(MistralConfig, MistralForCausalLM, {"sliding_window": None, "head_dim": 32}),
    "qwen2": Spec(
        Qwen2Config, Qwen2ForCausalLM, {"rope_parameters": _YARN, "tie_word_embeddings": True}
    ),
    "qwen3": Spec(Qwen3Config, Qwen3ForCausalLM, {"tie_word_embeddings": True}),
}
"""Layers that attend to all positions."""
WINDOWED = {
    "mistral-windows": Spec(
        MistralConfig, MistralForCausalLM, {"sliding_window": 70, "head_dim": 32}
    ),
    "qwen2-window": Spec(
        Qwen2Config,
        Qwen2ForCausalLM,
        {"use_sliding_window": True, "sliding_window": 48, "max_window_layers": 1},
    ),
    "qwen3-windows": Spec(
        Qwen3Config,
        Qwen3ForCausalLM,
        {
            "use_sliding_window": True,
            "sliding_window": 33,
            "num_hidden_layers": 5,
            "layer_types": [
                "sliding_attention",
                "full_attention",
                "sliding_attention",
                "sliding_attention",
                "full_attention",
            ],
        },
    ),
}
"""Models with sliding windows in all or some layers."""
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 144,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": EOS[0],
    "pad_token_id": 0,
    "dtype": "float32",
}


FEW_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
"""Settings for Triton's interpreter, which runs each head of a token as a separate program or loop
iteration."""


def write_checkpoint(name: str, folder: Path, **settings: int) -> PreTrainedModel:
    """Saves the checkpoint and returns transformers' model of it.

    Args:
        name: name in SPECS or WINDOWED.
        folder: target folder.
        settings: settings that replace the architecture's.
    """
    spec = SPECS.get(name) or WINDOWED[name]
    torch.manual_seed(3)
    config = spec.config_class(**{**_SIZES, **spec.settings, **settings})
    model: PreTrainedModel = spec.model_class(config).float().eval()
    # With the usual small initial weights, the input embedding would dominate, and a wrong layer
    # would hardly affect the logits.
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim == 2 and "layers" in key:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5)
            elif parameter.ndim == 1:
                parameter.normal_(0.0 if key.endswith("bias") else 1.0, 0.2)
        model.model.norm.weight.mul_(8.0)
        model.lm_head.weight.normal_(0.0, 0.05)
    model.generation_config = GenerationConfig(
        bos_token_id=1, eos_token_id=EOS, pad_token_id=0, do_sample=False
    )
    model.save_pretrained(folder, max_shard_size=spec.shard_size)
    return model
