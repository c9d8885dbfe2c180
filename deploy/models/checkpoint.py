"""Checkpoints in Hugging Face format: bf16 safetensors, config, tokenizer and chat template."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

from deploy.models.tokenizer import (
    CHAT_TEMPLATE,
    END_OF_TEXT,
    MASK,
    PADDING,
    TURN_END,
    save_tokenizer,
)

_MAX_POSITIONS: Final = 4096
_DIFFUSION_MAX_POSITIONS: Final = 2048
_ROPE_THETA: Final = 10_000.0


def demo_config(tokenizer: Tokenizer) -> Qwen3Config:
    """Configuration of ``demo``: 5.4 million parameters."""
    return _config(tokenizer, width=256, num_layers=6)


def draft_config(tokenizer: Tokenizer) -> Qwen3Config:
    """Configuration of ``demo-draft``: 0.9 million parameters, 1/3 of them in the embedding."""
    return _config(tokenizer, width=128, num_layers=3)


def _config(tokenizer: Tokenizer, *, width: int, num_layers: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=num_layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 64,
        head_dim=32,
        max_position_embeddings=_MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": _ROPE_THETA},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(TURN_END),
        pad_token_id=tokenizer.token_to_id(PADDING),
    )


def demo_diffusion_config(tokenizer: Tokenizer) -> Qwen3Config:
    """Configuration of ``demo-diffusion``: 2.5 million parameters."""
    return Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=5,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=_DIFFUSION_MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": _ROPE_THETA},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(TURN_END),
        pad_token_id=tokenizer.token_to_id(PADDING),
    )


def save_diffusion_checkpoint(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, directory: Path, block_size: int
) -> None:
    """Saves a block-diffusion model in the format of SDAR, which uses Qwen3's layers and tensor
    names."""
    save_checkpoint(model, tokenizer, directory)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for name in ("rope_parameters", "layer_types", "transformers_version"):
        config.pop(name, None)
    config |= {
        "architectures": ["SDARForCausalLM"],
        "model_type": "sdar",
        "block_size": block_size,
        "mask_token_id": tokenizer.token_to_id(MASK),
    }
    path.write_text(json.dumps(config, indent=2) + "\n")


def save_checkpoint(
    model: Qwen3ForCausalLM,
    tokenizer: Tokenizer,
    directory: Path,
    template: str = CHAT_TEMPLATE,
) -> None:
    """Writes all files that are needed for serving; replaces an existing checkpoint."""
    rounded = copy.deepcopy(model).bfloat16()
    rounded.save_pretrained(directory)
    _update_json(directory / "config.json", {"rope_theta": _ROPE_THETA})
    end_tokens = [tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)]
    _update_json(directory / "generation_config.json", {"eos_token_id": end_tokens})
    save_tokenizer(tokenizer, directory, _MAX_POSITIONS, template)


def _update_json(path: Path, changes: dict[str, object]) -> None:
    # Many loaders, and transformers before version 5, read rope_theta at the top level.
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}, indent=2) + "\n")
