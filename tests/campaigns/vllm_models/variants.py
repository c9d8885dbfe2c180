"""Changes of test checkpoints for vLLM, and the reasons of known differences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """Changes of one test checkpoint."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the checkpoint, for features that vLLM does not have in this family."""
    vllm_keys: Mapping[str, Any] = field(default_factory=dict)
    """config.json keys that vLLM requires: released checkpoints have them, transformers leaves out
    those that it derives."""
    without: tuple[str, ...] = ()
    """config.json keys that released checkpoints of the family do not have, but vLLM reads."""


_LATENT_EPS: Final = {"rms_norm_eps": 1e-6}
"""transformers fixes the epsilon of the norms of latents at 1e-6, as DeepSeek's own code does; vLLM
uses `rms_norm_eps`. DeepSeek's configurations have 1e-6."""
_YARN: Final = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.7,
    "mscale_all_dim": 2.0,
}
"""vLLM computes YaRN in torch. Its CPU kernel for unscaled rotary embedding reads queries and keys
of latent attention, which have three dimensions, with the wrong strides."""
_SIGMOID = Variant(
    settings=_LATENT_EPS, vllm_keys={"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
)
_LAYER_NORM: Final = ("rms_norm_eps",)
"""vLLM selects RMSNorm for Cohere if rms_norm_eps is present."""
_COHERE_WINDOW: Final = {"sliding_window": 20}
"""Windows of 21 tokens. vLLM's windows for Cohere hold one token more than `sliding_window`, as in
Cohere's training according to vLLM; transformers' and this engine's do not."""
_FULL_ATTENTION = Variant(
    settings={"use_sliding_window": False, "layer_types": ["full_attention"] * 3}
)
"""vLLM does not support windows in some of the layers of these families."""
_NO_GROUPS = Variant(settings={"num_key_value_heads": 2})
_DENSE_FIRST: Final = {"mlp_layer_types": ["dense", "sparse", "sparse"]}


def _longrope(num_factors: int, **keys: float) -> dict[str, Any]:
    """LongRoPE with a factor for each pair of rotary dimensions. Prompts are shorter than the
    original context: vLLM selects the factors by the maximum length of the model, transformers by
    that of the request."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 100.0,
        "short_factor": [1.0 + 0.25 * number for number in range(num_factors)],
        "long_factor": [2.0 + 0.5 * number for number in range(num_factors)],
        "original_max_position_embeddings": 256,
        **keys,
    }
    return {"rope_parameters": rope, "original_max_position_embeddings": 256}


VARIANTS: Final[Mapping[str, Variant]] = {
    "cohere": Variant(without=_LAYER_NORM),
    "cohere2": Variant(vllm_keys=_COHERE_WINDOW, without=_LAYER_NORM),
    # vLLM rotates dense layers only if they are the first ones.
    "cohere2-moe": Variant(settings=_DENSE_FIRST, vllm_keys=_COHERE_WINDOW, without=_LAYER_NORM),
    "cohere2-moe-sigmoid": Variant(vllm_keys=_COHERE_WINDOW),
    "deepseek-v2": Variant(settings=_LATENT_EPS),
    # vLLM requires the number of groups of experts.
    "deepseek-v2-lite": Variant(settings=_LATENT_EPS, vllm_keys={"n_group": 1, "topk_group": 1}),
    "deepseek-v3": _SIGMOID,
    "deepseek-halves": _SIGMOID,
    # vLLM does not read ffn_hidden_size: its MLPs are four times as wide as the hidden state.
    "falcon": Variant(settings={"ffn_hidden_size": 256}),
    # vLLM does not read mamba_norm_before_gate and projectors_bias.
    "falcon-h1-norm": Variant(settings={"mamba_norm_before_gate": False, "projectors_bias": False}),
    "glm4-moe-lite": Variant(
        settings={**_DENSE_FIRST, **_LATENT_EPS, "rope_parameters": _YARN},
        vllm_keys={"first_k_dense_replace": 1},
    ),
    "gpt-oss": Variant(
        settings={
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 100.0,
                "factor": 8.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
            }
        }
    ),
    # vLLM does not read attention_bias.
    "hy3": Variant(
        settings={**_DENSE_FIRST, "attention_bias": False},
        vllm_keys={
            "first_k_dense_replace": 1,
            "expert_hidden_dim": 32,
            "qk_norm": True,
            "route_norm": True,
        },
    ),
    "lfm2": Variant(vllm_keys={"conv_dim": 64}),
    "minimax-m2": Variant(settings={"rotary_dim": 16}, vllm_keys={"scoring_func": "sigmoid"}),
    # vLLM has no class for Ministral; without windows, it is Mistral.
    "ministral": Variant(
        settings={"layer_types": ["full_attention"] * 3},
        vllm_keys={"architectures": ["MistralForCausalLM"], "sliding_window": None},
    ),
    # vLLM reads the scaling of queries only in Mistral's own format.
    "ministral3": Variant(
        vllm_keys={"llama_4_scaling": {"original_max_position_embeddings": 32, "beta": 0.9}}
    ),
    "deepseek-v3.2": Variant(settings={"index_head_dim": 64}),
    "glm-5": Variant(settings={"index_head_dim": 64}),
    "gpt-neox": _NO_GROUPS,
    "gpt-neox-serial": _NO_GROUPS,
    "minimax-m3": Variant(settings={"rotary_dim": 16}),
    "mistral4": Variant(settings={"qk_nope_head_dim": 96}),  # for partial_rotary_factor 0.4
    "helium": Variant(settings={"num_attention_heads": 2, "num_key_value_heads": 1}),
    "phi3": Variant(settings=_longrope(8, partial_rotary_factor=0.5)),
    "phimoe": Variant(settings=_longrope(16, short_mscale=1.3, long_mscale=1.5)),
    # vLLM fixes the epsilon of the norms of queries and keys.
    "olmoe": Variant(settings={"rms_norm_eps": 1e-5}),
    "qwen2": _FULL_ATTENTION,
    "qwen3": _FULL_ATTENTION,
    "trinity": Variant(
        vllm_keys={"score_func": "sigmoid", "n_group": 1, "topk_group": 1, "route_norm": True}
    ),
}
"""Variants, keyed by test checkpoint."""
LEFT_OUT: Final = ("minicpm3",)
"""Test checkpoints whose head sizes vLLM does not support on CPU and that cannot be changed alone.
"""
_NO_LAYER_EMBEDDINGS: Final = "only vLLM's multimodal class computes per-layer embeddings"
REASONS: Final[Mapping[str, str]] = {
    "apertus": "vLLM keeps the parameters of xIELU in bf16",
    "deepseek-halves": "vLLM ignores rope_interleave",
    "ernie4-5-moe": "vLLM's router on CPU ignores the correction bias after a softmax",
    "gemma3n": f"{_NO_LAYER_EMBEDDINGS}; vLLM shares the KV cache of the last two unshared layers",
    "gemma3n-without-sharing": _NO_LAYER_EMBEDDINGS,
}
"""Reasons of differences that remain, keyed by test checkpoint."""
