"""What `config.json` of a checkpoint says about its mathematics. No torch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.models.checkpoint import block_hash_salt, read_json, resolve_checkpoint
from worker.models.moe_config import MoeConfig, parse_llada2_moe, parse_qwen3_moe
from worker.models.rope_config import RopeConfig, parse_rope
from worker.models.unsupported import refuse_unsupported

logger = logging.getLogger(__name__)

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "SDARForCausalLM",
    "SDARMoeForCausalLM",
    "LLaDA2MoeModelLM",
)
"""Supported values of `architectures` in config.json."""

# What a missing key means, by architecture, as transformers' configuration classes have it.
_COMMON_DEFAULTS: dict[str, Any] = {"rms_norm_eps": 1e-6, "hidden_act": "silu"}
_QWEN3_EXPERTS: dict[str, Any] = {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"max_position_embeddings": 2048, "eos_token_id": 2},
    "MistralForCausalLM": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "eos_token_id": 2,
    },
    "Qwen2ForCausalLM": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "Qwen3ForCausalLM": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "SDARForCausalLM": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "block_size": 4,
        "mask_token_id": 151669,
    },
    "Qwen3MoeForCausalLM": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "max_window_layers": 28,
        **_QWEN3_EXPERTS,
    },
    "SDARMoeForCausalLM": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "block_size": 4,
        "mask_token_id": 151669,
        **_QWEN3_EXPERTS,
        "norm_topk_prob": True,
    },
    "LLaDA2MoeModelLM": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "block_size": 32,
        "mask_token_id": 156895,
        "partial_rotary_factor": 0.5,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "moe_router_enable_expert_bias": True,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "num_shared_experts": 1,
    },
}
_EXPERTS: dict[str, Callable[[dict[str, Any]], MoeConfig]] = {
    "Qwen3MoeForCausalLM": parse_qwen3_moe,
    "SDARMoeForCausalLM": parse_qwen3_moe,
    "LLaDA2MoeModelLM": parse_llada2_moe,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """One checkpoint: sizes, rotary embedding, biases, limits, end tokens."""

    architecture: str
    folder: Path
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    """Leading dimensions of a head that rotate."""
    rms_norm_eps: float
    rope: RopeConfig
    attention_bias: bool
    """Biases in the q, k, v and output projections (Llama, Qwen3)."""
    mlp_bias: bool
    tie_word_embeddings: bool
    max_model_len: int
    """Longest sequence that is computed exactly."""
    max_model_len_reason: str
    """Which keys of config.json that limit comes from."""
    eos_token_ids: tuple[int, ...]
    block_hash_salt: str
    """Names this very checkpoint in block hashes."""
    block_size: int = 1
    """Tokens that are decided together, and see each other: 1 for an autoregressive model."""
    mask_token_id: int | None = None
    """Stands for what is undecided; None for an autoregressive model."""
    moe: MoeConfig | None = None
    """None for a dense model."""

    @classmethod
    def parse(cls, raw: dict[str, Any], folder: Path, *, weights: bool = True) -> ModelConfig:
        """Reads the content of config.json; end tokens and salt come from the folder's files.

        Without `weights` the folder may lack them.
        """
        architecture = _architecture(raw)
        given = {key: value for key, value in raw.items() if value is not None}
        # null switches a window off and lets head counts and sizes follow from others.
        merged = {**_COMMON_DEFAULTS, **_DEFAULTS[architecture], **given}
        for key in ("sliding_window", "head_dim", "num_key_value_heads"):
            if key in raw and raw[key] is None:
                merged[key] = None
        moe, partial = None, 1.0
        if architecture in _EXPERTS:
            # transformers 5 writes the second name.
            merged["num_experts"] = merged.pop("num_local_experts", merged["num_experts"])
            moe = _EXPERTS[architecture](merged)
            merged.pop("num_experts")
        if architecture == "LLaDA2MoeModelLM":
            partial = float(merged.pop("partial_rotary_factor"))
        refuse_unsupported(merged)
        num_heads = _integer(merged, "num_attention_heads")
        hidden_size = _integer(merged, "hidden_size")
        max_position_embeddings = _integer(merged, "max_position_embeddings")
        rope = parse_rope(merged, max_position_embeddings)
        limit, reason = _length_limit(architecture, merged, rope, max_position_embeddings)
        block_size, mask_token_id = _block_diffusion(merged)
        head_dim = int(merged.get("head_dim") or hidden_size // num_heads)
        return cls(
            architecture=architecture,
            folder=folder,
            vocab_size=_integer(merged, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_integer(merged, "intermediate_size"),
            num_layers=_integer(merged, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=int(merged.get("num_key_value_heads") or num_heads),
            head_dim=head_dim,
            rotary_dim=int(head_dim * partial),
            moe=moe,
            rms_norm_eps=float(merged["rms_norm_eps"]),
            rope=rope,
            attention_bias=bool(merged.get("attention_bias", False)),
            mlp_bias=bool(merged.get("mlp_bias", False)),
            tie_word_embeddings=bool(merged.get("tie_word_embeddings", False)),
            max_model_len=limit // block_size * block_size,
            max_model_len_reason=reason,
            eos_token_ids=_eos_token_ids(merged, folder),
            block_hash_salt=block_hash_salt(folder, weights=weights),
            block_size=block_size,
            mask_token_id=mask_token_id,
        )

    def resolve_max_model_len(self, requested: int | None) -> int:
        """The length limit of an engine: what was asked for, or the checkpoint's own; whole blocks.

        Raises:
            ValueError: more was asked for than the checkpoint can do.
        """
        if requested is None:
            return self.max_model_len
        if requested > self.max_model_len:
            raise ValueError(
                f"--max-model-len {requested} is more than this checkpoint's "
                f"{self.max_model_len} ({self.max_model_len_reason}): lower it"
            )
        if requested < self.block_size:
            raise ValueError(
                f"--max-model-len {requested} is less than one block of this model, "
                f"{self.block_size} tokens: raise it"
            )
        return requested // self.block_size * self.block_size


def load_model_config(model: str, *, weights: bool = True) -> ModelConfig:
    """Reads a checkpoint folder or a Hub repository.

    Args:
        model: the folder or the repository's name.
        weights: whether the checkpoint's weights are needed too.

    Raises:
        ValueError: there is no such checkpoint, or its mathematics is not supported; the message
            names the key.
    """
    folder = resolve_checkpoint(model, weights=weights)
    return ModelConfig.parse(read_json(folder / "config.json"), folder, weights=weights)


def _architecture(raw: dict[str, Any]) -> str:
    names = raw.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            return str(name)
    raise ValueError(
        f"architectures {names} in config.json: none is supported "
        f"(supported: {', '.join(ARCHITECTURES)})"
    )


def _integer(raw: dict[str, Any], key: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{key} in config.json must be a positive integer, got {value!r}")
    return value


def _block_diffusion(raw: dict[str, Any]) -> tuple[int, int | None]:
    """Block size and mask token; (1, None) for an autoregressive model."""
    if raw.get("mask_token_id") is None:
        return 1, None
    size, mask_token_id = _integer(raw, "block_size"), int(raw["mask_token_id"])
    if size < 2 or size & (size - 1):
        raise ValueError(
            f"block_size in config.json must be a power of two from 2 on, got {size}: "
            "use another checkpoint"
        )
    if not 0 <= mask_token_id < _integer(raw, "vocab_size"):
        raise ValueError(f"mask_token_id {mask_token_id} in config.json is not in the vocabulary")
    return size, mask_token_id


def _length_limit(
    architecture: str, raw: dict[str, Any], rope: RopeConfig, max_position_embeddings: int
) -> tuple[int, str]:
    """Full attention equals windowed attention for sequences no longer than the window."""
    limit = rope.scaled_length(max_position_embeddings)
    reason = f"max_position_embeddings {max_position_embeddings}, rope kind {rope.kind}"
    window = _window(architecture, raw)
    if window is not None and window < limit:
        logger.warning(
            "the checkpoint attends over a sliding window of %d tokens, which is not implemented: "
            "the maximum model length is lowered from %d to %d, where both are the same",
            window,
            limit,
            window,
        )
        return window, f"sliding_window {window}, beyond which windowed attention would be needed"
    return limit, reason


def _window(architecture: str, raw: dict[str, Any]) -> int | None:
    """Width of the sliding window, None where no layer has one."""
    window = raw.get("sliding_window")
    layer_types = raw.get("layer_types")
    if architecture == "LlamaForCausalLM":
        return None
    if not architecture.startswith("Mistral"):
        if not raw.get("use_sliding_window", False):
            return None
        if layer_types is None and raw["max_window_layers"] >= raw["num_hidden_layers"]:
            return None
        if layer_types is not None and "sliding_attention" not in layer_types:
            return None
    return None if window is None else int(window)


def _eos_token_ids(raw: dict[str, Any], folder: Path) -> tuple[int, ...]:
    """End tokens of generation_config.json, else of config.json."""
    path = folder / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}
    value = generation.get("eos_token_id")
    if value is None:
        value = raw.get("eos_token_id")
    if value is None:
        return ()
    return tuple(int(token) for token in (value if isinstance(value, list) else [value]))
