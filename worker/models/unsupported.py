"""Refuses, by name, configuration keys that would change the mathematics unnoticed."""

from __future__ import annotations

from typing import Any

_REMEDY = "use a checkpoint without it"

# key: (values without effect, what to do about any other)
_WITHOUT_EFFECT: dict[str, tuple[tuple[object, ...], str]] = {
    "quantization_config": ((), "use the checkpoint's unquantized version"),
    "compression_config": ((), "use the checkpoint's unquantized version"),
    "hidden_act": (("silu", "swish"), "only silu is supported: " + _REMEDY),
    "attn_logit_softcapping": ((0,), _REMEDY),
    "final_logit_softcapping": ((0,), _REMEDY),
    "logit_scale": ((1,), _REMEDY),
    "logits_scaling": ((1,), _REMEDY),
    "embedding_multiplier": ((1,), _REMEDY),
    "residual_multiplier": ((1,), _REMEDY),
    "attention_multiplier": ((), _REMEDY),
    "query_pre_attn_scalar": ((), _REMEDY),
    "attention_chunk_size": ((), _REMEDY),
    "clip_qkv": ((), _REMEDY),
    "num_experts": ((0, 1), "mixtures of experts are not supported: " + _REMEDY),
    "num_local_experts": ((0, 1), "mixtures of experts are not supported: " + _REMEDY),
    "no_rope_layers": (([],), _REMEDY),
    "is_encoder_decoder": ((False,), _REMEDY),
    "add_cross_attention": ((False,), _REMEDY),
}
# pretraining_tp only splits the same sums into pieces, so every value of it is honoured.

_LAYER_TYPES = ("full_attention", "sliding_attention")


def refuse_unsupported(raw: dict[str, Any]) -> None:
    """Checks the keys of a config.json.

    Raises:
        ValueError: a key changes the mathematics in a way that is not implemented.
    """
    for key, (neutral, remedy) in _WITHOUT_EFFECT.items():
        value = raw.get(key)
        if value is not None and value not in neutral:
            raise ValueError(f"{key} = {_short(value)} in config.json is not supported: {remedy}")
    for kind in raw.get("layer_types") or ():
        if kind not in _LAYER_TYPES:
            raise ValueError(f"layer_types names {kind!r}, which is not supported: {_REMEDY}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
