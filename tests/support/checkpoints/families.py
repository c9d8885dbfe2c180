"""A tiny random checkpoint of each family, by transformers' own class, in which every feature of
the family is switched on and matters; and what would be wrong if one of them were missed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, PreTrainedModel

from kernels import ExpertChoice, linear
from worker.models.glm4 import SandwichLayer
from worker.models.layers import AttentionTraits, RMSNorm, WideQueryKeyNorm
from worker.models.linear import ColumnParallelLinear
from worker.models.moe import MoeNames, choose_experts
from worker.models.moe_config import MoeConfig

VOCAB_SIZE = 97


@dataclass(frozen=True, kw_only=True)
class Patch:
    """Another value of an attribute of the code under test."""

    target: str
    """Module, colon, path of the attribute: "worker.models.llama:LlamaLayer.forward"."""
    value: Any


Mutation = Mapping[str, Any] | Patch
"""Keys of config.json that then say something else, or changed code."""


@dataclass(frozen=True, kw_only=True)
class Specimen:
    """A family's checkpoint."""

    name: str
    """Of transformers' classes, without Config and ForCausalLM."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    mutations: Mapping[str, Mutation] = field(default_factory=dict)
    """By feature."""
    wrapper: str = ""
    """Of transformers' classes of a model with images whose text part this is."""
    lacks_head_dim: bool = False
    """Whether its configuration has none, so that a head is hidden_size / heads wide."""


_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-3,
    "bos_token_id": 1,
    "eos_token_id": 7,
    "pad_token_id": 0,
    "dtype": "float32",
}
_WINDOW = 21
_ROPE = {"rope_type": "default", "rope_theta": 100.0}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
}
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
_EPS = {"eps": {"rms_norm_eps": 0.1}}
_THETA = {"theta": {"rope_parameters": {**_ROPE, "rope_theta": 300.0}}}
_WINDOW_PLUS_1 = {"window of one more": {"sliding_window": _WINDOW + 1}}

_HALF_ROPE = {**_ROPE, "partial_rotary_factor": 0.5}
_MINISTRAL_ROPE = {
    **_YARN,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.9,
}


def _without_bias(self: ColumnParallelLinear, x: torch.Tensor) -> torch.Tensor:
    return linear(x, self._packed)


def _swapped_norms(self: SandwichLayer, *args: Any) -> Any:
    """Those behind the blocks in each other's place."""
    first, second, third, fourth = norms = self.norms
    self.norms = [first, fourth, third, second]
    try:
        return _SANDWICH(self, *args)
    finally:
        self.norms = norms


def _choose_without_bias(scores: torch.Tensor, bias: torch.Tensor, moe: MoeConfig) -> ExpertChoice:
    return choose_experts(scores, None, moe)


def _norm_of_heads(self: WideQueryKeyNorm, *both: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Each head by itself, by the weights of its own."""
    return tuple(
        torch.nn.functional.rms_norm(x, x.shape[-1:], eps=self._eps) * weight.view(x.shape[1:])
        for x, weight in zip(both, self._weights, strict=True)
    )


def _always_rotating(**traits: Any) -> AttentionTraits:
    return AttentionTraits(**{**traits, "rotates": True})


_SANDWICH = SandwichLayer.forward
_IN_HALVES = Patch(target="worker.models.layers:ColumnParallelLinear.reorder", value=lambda *_: 0)
"""As Llama's dimensions rotate."""

SPECIMENS: dict[str, Specimen] = {
    "llama": Specimen(
        name="Llama",
        settings={"rope_parameters": _LLAMA3, "attention_bias": True, "mlp_bias": True},
        mutations={
            "llama3 factor": {"rope_parameters": {**_LLAMA3, "factor": 2.0}},
            "llama3 border": {"rope_parameters": {**_LLAMA3, "high_freq_factor": 8.0}},
            **_EPS,
        },
    ),
    "granite": Specimen(
        name="Granite",
        settings={
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.5,
            "residual_multiplier": 0.6,
            "logits_scaling": 0.25,
            "tie_word_embeddings": True,
            "rope_parameters": _ROPE,
        },
        mutations={
            "embedding": {"embedding_multiplier": 1.0},
            "scale of attention": {"attention_multiplier": 0.25},
            "residual": {"residual_multiplier": 1.0},
            "logits": {"logits_scaling": 4.0},
            **_THETA,
        },
        lacks_head_dim=True,
    ),
    "mistral": Specimen(
        name="Mistral",
        settings={"sliding_window": 37, "rope_parameters": _ROPE},
        mutations={
            "no window": {"sliding_window": None},
            "window of one more": {"sliding_window": 38},
            **_THETA,
        },
    ),
    "qwen2": Specimen(
        name="Qwen2",
        settings={
            "rope_parameters": _YARN,
            "use_sliding_window": True,
            "sliding_window": _WINDOW,
            "layer_types": _ALTERNATING,
            "tie_word_embeddings": True,
        },
        mutations={
            "yarn factor": {"rope_parameters": {**_YARN, "factor": 4.0}},
            "yarn temperature": {"rope_parameters": {**_YARN, "attention_factor": 1.0}},
            "order of windows": {"layer_types": _ALTERNATING[1:] + _ALTERNATING[:1]},
            **_WINDOW_PLUS_1,
        },
        lacks_head_dim=True,
    ),
    "qwen3": Specimen(
        name="Qwen3",
        settings={
            "rope_parameters": _ROPE,
            "use_sliding_window": True,
            "sliding_window": _WINDOW,
            "layer_types": _ALTERNATING,
        },
        mutations={**_EPS, **_THETA, **_WINDOW_PLUS_1},
    ),
    "qwen3-moe": Specimen(
        name="Qwen3Moe",
        settings={
            "rope_parameters": _ROPE,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
        mutations={
            "sum of weights": {"norm_topk_prob": False},
            "number of experts": {"num_experts_per_tok": 2},
            **_THETA,
        },
    ),
    "ministral3": Specimen(
        name="Ministral3",
        settings={"rope_parameters": _MINISTRAL_ROPE, "sliding_window": None},
        mutations={
            "beta": {"rope_parameters": {**_MINISTRAL_ROPE, "llama_4_scaling_beta": 0.3}},
            "no beta": {"rope_parameters": {**_MINISTRAL_ROPE, "llama_4_scaling_beta": 0.0}},
            "length": {
                "rope_parameters": {**_MINISTRAL_ROPE, "original_max_position_embeddings": 64}
            },
            "mscale": {"rope_parameters": {**_MINISTRAL_ROPE, "mscale_all_dim": 0.3}},
        },
    ),
    "mistral3": Specimen(
        name="Mistral",
        settings={"rope_parameters": _ROPE, "sliding_window": None},
        mutations={**_THETA, **_EPS},
        wrapper="Mistral3",
    ),
    "mistral3-of-ministral3": Specimen(
        name="Ministral3",
        settings={
            "rope_parameters": _MINISTRAL_ROPE,
            "sliding_window": None,
            "tie_word_embeddings": True,
        },
        mutations={
            "no beta": {"rope_parameters": {**_MINISTRAL_ROPE, "llama_4_scaling_beta": 0.0}},
        },
        wrapper="Mistral3",
    ),
    "glm4": Specimen(
        name="Glm4",
        settings={"rope_parameters": _HALF_ROPE, "attention_bias": True},
        mutations={
            "order of dimensions": _IN_HALVES,
            "no bias": Patch(
                target="worker.models.layers:ColumnParallelLinear.forward", value=_without_bias
            ),
            "norms behind blocks": Patch(
                target="worker.models.glm4:SandwichLayer.forward", value=_swapped_norms
            ),
            "theta": {"rope_parameters": {**_HALF_ROPE, "rope_theta": 300.0}},
            "partial": {
                "rope_parameters": {**_HALF_ROPE, "partial_rotary_factor": 1.0},
                "partial_rotary_factor": 1.0,
            },
        },
    ),
    "glm4-moe": Specimen(
        name="Glm4Moe",
        settings={
            "rope_parameters": _HALF_ROPE,
            "attention_bias": True,
            "use_qk_norm": True,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.7,
            "n_group": 4,
            "topk_group": 2,
        },
        mutations={
            "scale of experts": {"routed_scaling_factor": 1.0},
            "groups": {"topk_group": 4},
            "sum of weights": {"norm_topk_prob": False},
            "bias of the router": Patch(
                target="worker.models.moe:choose_experts", value=_choose_without_bias
            ),
        },
    ),
    "smollm3": Specimen(
        name="SmolLM3",
        settings={
            "rope_parameters": _ROPE,
            "no_rope_layers": [1, 0, 1],
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
        mutations={
            "inverted": {"no_rope_layers": [0, 1, 0]},
            "all rotate": {"no_rope_layers": [1, 1, 1]},
            **_THETA,
        },
        lacks_head_dim=True,
    ),
    "seed-oss": Specimen(
        name="SeedOss",
        settings={"rope_parameters": _ROPE, "attention_bias": True, "attention_out_bias": False},
        mutations={**_THETA, **_EPS},
    ),
    "seed-oss-biases": Specimen(
        name="SeedOss",
        settings={"rope_parameters": _ROPE, "attention_bias": False, "attention_out_bias": True},
        mutations={**_THETA},
    ),
    "olmo2": Specimen(
        name="Olmo2",
        settings={"rope_parameters": _ROPE},
        mutations={
            "norms of heads": Patch(
                target="worker.models.layers:WideQueryKeyNorm.forward", value=_norm_of_heads
            ),
            "order of norms": Patch(
                target="worker.models.post_norm:PostNormLayer.norm_names",
                value=("post_feedforward_layernorm", "post_attention_layernorm"),
            ),
            **_THETA,
            **_EPS,
        },
        lacks_head_dim=True,
    ),
    "ernie4-5": Specimen(
        name="Ernie4_5",
        settings={"rope_parameters": _ROPE, "tie_word_embeddings": True},
        mutations={"order of dimensions": _IN_HALVES, **_THETA},
    ),
    "exaone4": Specimen(
        name="Exaone4",
        settings={
            "rope_parameters": _ROPE,
            "sliding_window": _WINDOW,
            "layer_types": _ALTERNATING,
        },
        mutations={
            "full layers rotate": Patch(
                target="worker.models.post_norm:AttentionTraits", value=_always_rotating
            ),
            **_WINDOW_PLUS_1,
            **_THETA,
        },
    ),
    "cohere": Specimen(
        name="Cohere",
        settings={"rope_parameters": _ROPE, "logit_scale": 0.5, "layer_norm_eps": 1e-3},
        mutations={
            "logits": {"logit_scale": 1.0},
            "eps": {"layer_norm_eps": 0.1},
            "mean": Patch(target="worker.models.cohere:LayerNorm", value=RMSNorm),
            "order of dimensions": _IN_HALVES,
        },
        lacks_head_dim=True,
    ),
    "cohere2": Specimen(
        name="Cohere2",
        settings={
            "rope_parameters": _ROPE,
            "logit_scale": 0.5,
            "layer_norm_eps": 1e-3,
            "sliding_window": _WINDOW,
            "layer_types": _ALTERNATING,
        },
        mutations={
            "logits": {"logit_scale": 1.0},
            "full layers rotate": Patch(
                target="worker.models.cohere:AttentionTraits", value=_always_rotating
            ),
            "order of dimensions": _IN_HALVES,
            **_WINDOW_PLUS_1,
        },
        lacks_head_dim=True,
    ),
    "mixtral": Specimen(
        name="Mixtral",
        settings={
            "rope_parameters": _ROPE,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "sliding_window": 37,
        },
        mutations={
            "number of experts": {"num_experts_per_tok": 2},
            "up and gate": Patch(
                target="worker.models.mixtral:_NAMES", value=MoeNames(gate="w3", up="w1", down="w2")
            ),
            "window of one more": {"sliding_window": 38},
            **_THETA,
        },
    ),
}
"""By the family's name in tests."""


def write_specimen(name: str, folder: Path) -> PreTrainedModel:
    """Saves the checkpoint and returns transformers' model of it."""
    specimen = SPECIMENS[name]
    torch.manual_seed(3)
    settings = {**_SIZES, **specimen.settings}
    if specimen.lacks_head_dim:
        del settings["head_dim"]
    config = getattr(transformers, f"{specimen.name}Config")(**settings)
    if specimen.wrapper:
        model = _wrapped(specimen.wrapper, config)
    else:
        model = getattr(transformers, f"{specimen.name}ForCausalLM")(config)
    model = model.float().eval()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            _draw(key, tensor)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=7, pad_token_id=0)
    model.save_pretrained(folder)
    return model


def _wrapped(name: str, text: Any) -> Any:
    """A model with images, whose vision part is as small as can be."""
    vision = transformers.PixtralVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        head_dim=16,
        image_size=16,
        patch_size=8,
    )
    config = getattr(transformers, f"{name}Config")(
        text_config=text, vision_config=vision, tie_word_embeddings=text.tie_word_embeddings
    )
    return getattr(transformers, f"{name}ForConditionalGeneration")(config)


def _draw(key: str, tensor: torch.Tensor) -> None:
    """Initial values would hide features: biases of 0, norms of 1, layers that hardly count."""
    if not tensor.is_floating_point():
        return
    if key.endswith("bias"):
        tensor.normal_(0.0, 0.3)
    elif tensor.ndim == 1:
        tensor.normal_(1.0, 0.3)
    elif "embed_tokens" in key or "lm_head" in key:
        tensor.normal_(0.0, 0.4)
    else:
        tensor.normal_(0.0, 1.5 * tensor.shape[-1] ** -0.5)
