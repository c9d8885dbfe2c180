"""Checkpoints that are multimodal or have layers that are not loaded, and mutations of their tensor
names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tests.support.checkpoints.latents import EXPERTS, LATENTS
from tests.support.checkpoints.mutations import NO_NAMES
from tests.support.checkpoints.specimen import Mutation, Patch, Specimen
from worker.models.layers.moe import MoeNames

_ROPE = {"rope_type": "default", "rope_theta": 100.0}
_THETA: dict[str, Mutation] = {"theta": {"rope_parameters": {**_ROPE, "rope_theta": 300.0}}}
_LLAMA_MUTATIONS: dict[str, Mutation] = {"names": NO_NAMES, **_THETA, "eps": {"rms_norm_eps": 0.1}}


def _transposed(tensors: dict[str, torch.Tensor], _: Any) -> dict[str, torch.Tensor]:
    """Transposes stacked experts to the layout that Qwen releases; transformers saves them by
    output features."""
    return {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
        for name, tensor in tensors.items()
    }


def _as_kimi(tensors: dict[str, torch.Tensor], _: Any) -> dict[str, torch.Tensor]:
    """Fixes the names of vision layers: on saving, transformers renames them like text-model
    layers."""
    return {name.replace(".model.blocks.", ".model.layers."): tensors[name] for name in tensors}


_KIMI = Specimen(
    name="DeepseekV3",
    settings={
        **LATENTS,
        **EXPERTS,
        "rope_parameters": _ROPE,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    is_variant=True,
    mutations={"names": NO_NAMES, **_THETA},
    multimodal="Kimi_K25",
    rewrite=_as_kimi,
    lacks_head_dim=True,
)

_HALF_MROPE = {**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
_PARTIAL: dict[str, Mutation] = {
    "partial": {
        "partial_rotary_factor": 0.25,
        "rope_parameters": {**_HALF_MROPE, "partial_rotary_factor": 0.25},
    }
}
_GLM_IMAGES = Specimen(
    name="Glm4",
    config="Glm4vText",
    settings={"rope_parameters": _HALF_MROPE},
    mutations={"names": NO_NAMES, "eps": {"rms_norm_eps": 0.1}, **_PARTIAL},
    multimodal="Glm4v",
    lacks_head_dim=True,
    is_variant=True,
)
TEXT_SPECIMENS: dict[str, Specimen] = {
    "kimi-k2-5": _KIMI,
    "kimi-k2-5-released": replace(_KIMI, architecture="KimiK25ForConditionalGeneration"),
    "qwen3-moe-images": Specimen(
        name="Qwen3VLMoe",
        is_variant=True,
        config="Qwen3VLMoeText",
        settings={
            "rope_parameters": {**_ROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True},
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "mlp_only_layers": [1],
            "tie_word_embeddings": False,
        },
        mutations={
            "names": NO_NAMES,
            "stacked experts": Patch(
                target="worker.models.architectures.qwen3_moe:as_stored",
                value=lambda *_: MoeNames(),
            ),
            "number of experts": {"num_experts_per_tok": 2},
            "sum of weights": {"norm_topk_prob": False},
            **_THETA,
        },
        multimodal="Qwen3VLMoe",
        rewrite=_transposed,
    ),
    "llava": Specimen(
        name="Llama",
        is_variant=True,
        settings={"rope_parameters": _ROPE},
        mutations=_LLAMA_MUTATIONS,
        multimodal="Llava",
    ),
    "llava-next": Specimen(
        name="Mistral",
        settings={"rope_parameters": _ROPE, "sliding_window": 37},
        mutations={"names": NO_NAMES, **_THETA, "window of one more": {"sliding_window": 38}},
        multimodal="LlavaNext",
        is_variant=True,
    ),
    "llava-onevision": Specimen(
        name="Qwen2",
        settings={"rope_parameters": _ROPE},
        mutations=_LLAMA_MUTATIONS,
        multimodal="LlavaOnevision",
        lacks_head_dim=True,
        is_variant=True,
    ),
    "internvl": Specimen(
        name="Qwen3",
        settings={"rope_parameters": _ROPE},
        mutations=_LLAMA_MUTATIONS,
        multimodal="InternVL",
        is_variant=True,
    ),
    "lfm2-images": Specimen(
        name="Lfm2",
        settings={
            "layer_types": ["conv", "full_attention", "conv"],
            "norm_eps": 1e-3,
            "rope_parameters": _ROPE,
        },
        mutations={"names": NO_NAMES, **_THETA, "eps": {"norm_eps": 0.1}},
        multimodal="Lfm2Vl",
        is_variant=True,
    ),
    "idefics3": Specimen(
        name="Llama",
        settings={"rope_parameters": _ROPE},
        mutations=_LLAMA_MUTATIONS,
        multimodal="Idefics3",
        is_variant=True,
    ),
    "smolvlm": Specimen(
        name="Llama",
        settings={"rope_parameters": _ROPE},
        mutations=_LLAMA_MUTATIONS,
        multimodal="SmolVLM",
        is_variant=True,
    ),
    "qwen2-images": Specimen(
        name="Qwen2",
        config="Qwen2VLText",
        settings={"rope_parameters": {**_ROPE, "mrope_section": [4, 2, 2]}},
        mutations=_LLAMA_MUTATIONS,
        multimodal="Qwen2VL",
        lacks_head_dim=True,
        is_variant=True,
    ),
    "exaone4-images": Specimen(
        name="Exaone4",
        settings={
            "rope_parameters": _ROPE,
            "sliding_window": 21,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        mutations={"names": NO_NAMES, **_THETA, "window of one more": {"sliding_window": 22}},
        multimodal="Exaone4_5_",
        is_variant=True,
    ),
    "glm4-images": _GLM_IMAGES,
    "glm4-6-images": replace(_GLM_IMAGES, multimodal="Glm46V"),
    "glm4-moe-images": Specimen(
        name="Glm4Moe",
        config="Glm4vMoeText",
        settings={
            "rope_parameters": _HALF_MROPE,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 1.5,
        },
        mutations={
            "names": NO_NAMES,
            "number of experts": {"num_experts_per_tok": 2},
            "no biases": {"attention_bias": False},
            **_PARTIAL,
        },
        multimodal="Glm4vMoe",
        is_variant=True,
    ),
    "voxtral": Specimen(
        name="Llama",
        is_variant=True,
        settings={"rope_parameters": _ROPE},
        mutations=_LLAMA_MUTATIONS,
        multimodal="Voxtral",
    ),
}
"""Test checkpoints, keyed by the family's name in tests."""
