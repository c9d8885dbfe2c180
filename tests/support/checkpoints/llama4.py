"""Checkpoints of Llama 4, and mutations that break each of its features."""

from __future__ import annotations

from typing import Any

import torch

from kernels.attention import AttentionMetadata
from tests.support.checkpoints.mutations import IN_HALVES, NO_NAMES
from tests.support.checkpoints.specimen import Patch, Specimen
from worker.models.architectures.llama4 import Llama4Moe
from worker.models.layers.moe import RoutedExperts

_CHUNK = 21
_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_CHUNK_PLUS_1 = {"chunk of one more": {"attention_chunk_size": _CHUNK + 1}}
_WINDOWS = Patch(
    target="worker.rank.batch:AttentionMetadata",
    value=lambda **fields: AttentionMetadata(**{**fields, "is_chunked": False}),
)
"""Makes each query attend to as many positions as a chunk has."""


def _without_shared_expert(
    self: Llama4Moe, hidden: torch.Tensor, *fp32_input: torch.Tensor
) -> torch.Tensor:
    assert self._shared is not None, "on CPU it is computed apart"
    return _MOE(self, hidden, *fp32_input) - self._shared.forward(hidden)


def _with_weights_of_outputs(self: RoutedExperts, *args: Any, **options: Any) -> torch.Tensor:
    """Weights the experts' outputs, as in other families."""
    return _EXPERTS(self, *args, **{**options, "weighs_inputs": False})


_MOE, _EXPERTS = Llama4Moe.forward, RoutedExperts.forward

LLAMA4_SPECIMENS: dict[str, Specimen] = {
    "llama4": Specimen(
        name="Llama4",
        covers=("positions", "cache", "shards", "experts", "functions"),
        config="Llama4Text",
        settings={
            "rope_parameters": _ROPE,
            "no_rope_layers": [1, 0, 1],
            "attention_chunk_size": _CHUNK,
            "attention_bias": True,
            "floor_scale": 16,
            "attn_scale": 0.5,
            "intermediate_size_mlp": 40,
            "moe_layers": [1, 2],
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        mutations={
            "windows": _WINDOWS,
            "everything seen": {"attention_chunk_size": 200},
            "order of layers": {"layer_types": ["full_attention", *["chunked_attention"] * 2]},
            "temperature": {"attn_temperature_tuning": False},
            "its strength": {"attn_scale": 0.2},
            "its length": {"floor_scale": 12},
            "norms of heads": {"use_qk_norm": False},
            "layers that rotate": {"no_rope_layers": [1, 1, 1]},
            "order of dimensions": IN_HALVES,
            "weights of outputs": Patch(
                target="worker.models.layers.moe:RoutedExperts.forward",
                value=_with_weights_of_outputs,
            ),
            "shared expert": Patch(
                target="worker.models.architectures.llama4:Llama4Moe.forward",
                value=_without_shared_expert,
            ),
            "number of experts": {"num_experts_per_tok": 1},
            "layers with experts": {"moe_layers": [0, 1]},
            "llama3 factor": {"rope_parameters": {**_ROPE, "factor": 2.0}},
            **_CHUNK_PLUS_1,
            "eps": {"rms_norm_eps": 0.1},
        },
    ),
    "llama4-images": Specimen(
        name="Llama4",
        is_variant=True,
        config="Llama4Text",
        settings={
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
            "no_rope_layer_interval": 3,
            "attention_chunk_size": _CHUNK,
            "use_qk_norm": False,
            "num_local_experts": 4,
        },
        mutations={"names": NO_NAMES, "windows": _WINDOWS, **_CHUNK_PLUS_1},
        multimodal="Llama4",
    ),
}
