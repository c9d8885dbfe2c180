"""Multimodal checkpoints, or with layers that are not loaded, and mutations of their tensors'
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
    """Stacked experts as Qwen releases them, where transformers saves them by output features."""
    return {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
        for name, tensor in tensors.items()
    }


def _as_kimi(tensors: dict[str, torch.Tensor], _: Any) -> dict[str, torch.Tensor]:
    """transformers undoes its name for layers of images with those of the text, too."""
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
    "voxtral": Specimen(
        name="Llama",
        is_variant=True,
        settings={"rope_parameters": _ROPE},
        mutations=_LLAMA_MUTATIONS,
        multimodal="Voxtral",
    ),
}
"""By the family's name in tests."""
