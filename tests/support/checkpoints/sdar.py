"""Tiny random SDAR checkpoints in the released format, and a plain torch reference with the same
weights.

transformers does not support SDAR, but its Qwen3 has the same tensors.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.support.checkpoints.moe import MoeCheckpoint, reference_logits

VOCAB_SIZE = 101
MASK = 97
EOS = [3, 5]


@dataclass(frozen=True)
class SdarCheckpoint:
    folder: str
    plain: MoeCheckpoint
    """Checkpoint for the reference, which also computes layers without experts."""
    block_size: int

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits [positions, vocabulary] of whole blocks with block-causal attention."""
        return reference_logits(self.plain, token_ids)


def write_sdar(
    folder: Path, block_size: int, *, sharpness: float = 14.0, vocab_size: int = VOCAB_SIZE
) -> SdarCheckpoint:
    """Saves a checkpoint whose confidences range from almost 0 to almost 1."""
    torch.manual_seed(block_size)
    config: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
    }
    rope = {"rope_type": "default", "rope_theta": 1000000.0}
    model = Qwen3ForCausalLM(Qwen3Config(**config, rope_parameters=rope)).float().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim == 2 and "layers" in key:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5)
            elif parameter.ndim == 1:
                parameter.normal_(1.0, 0.2)
        model.lm_head.weight.normal_(0.0, sharpness / 64)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {key: value.contiguous() for key, value in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    raw = {
        **config,
        "architectures": ["SDARForCausalLM"],
        "model_type": "sdar",
        "auto_map": {"AutoModelForCausalLM": "modeling_sdar.SDARForCausalLM"},
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": 2,
        "block_size": block_size,
        "mask_token_id": MASK,
        "eos_token_id": EOS[0],
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    return SdarCheckpoint(str(folder), MoeCheckpoint(str(folder), raw, weights), block_size)
