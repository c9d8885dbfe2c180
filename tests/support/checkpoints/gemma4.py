"""Checkpoints of Gemma 4, and mutations that break each of its features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from kernels import (
    Activation,
    HeadNorms,
    Norm,
    fused_add_norm,
    qk_norm_rope_store,
    rms_norm,
    silu_and_mul,
)
from tests.support.checkpoints.mutations import (
    NO_EMBEDDING_SCALE,
    NO_HEAD_NORMS,
    NO_NAMES,
    SILU,
    swapped_for,
)
from tests.support.checkpoints.specimen import VOCAB_SIZE, Mutation, Patch, Specimen
from worker.models.architectures.gemma4 import Gemma4Layer, Gemma4Router, ParallelExperts
from worker.models.config.rope_config import RopeConfig
from worker.models.layers.attention import AttentionTraits
from worker.models.layers.per_layer_embedding import PerLayerEmbedding
from worker.models.layers.rope import cos_sin_table
from worker.models.layers.shared_cache import SharedCacheAttention

_WINDOW = 21
_TURN = ["sliding_attention", "full_attention"]
_ROPE = {
    "full_attention": {
        "rope_type": "proportional",
        "rope_theta": 100.0,
        "partial_rotary_factor": 0.25,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
}
_TEXT = {
    "rope_parameters": _ROPE,
    "sliding_window": _WINDOW,
    "global_head_dim": 32,
    "num_key_value_heads": 4,
    "hidden_size_per_layer_input": 0,
}
_WINDOW_PLUS_1 = {"window of one more": {"sliding_window": _WINDOW + 1}}


def _full_rope(**change: float) -> dict[str, Any]:
    """Changed rotary settings of full-attention layers."""
    return {"rope_parameters": {**_ROPE, "full_attention": {**_ROPE["full_attention"], **change}}}


def _table_of_a_part(rope: RopeConfig, head_dim: int, *rest: Any) -> torch.Tensor:
    """Rotates the first dimensions of a head, as in other families."""
    if rope.rotating_share is not None:
        head_dim = int(head_dim * rope.rotating_share)
        rope = replace(rope, kind="default", rotating_share=None)
    return cos_sin_table(rope, head_dim, *rest)


def _packed(target: type, before: Callable[[Any], object]) -> Patch:
    """A module with changed values after loading."""
    process = target.process_after_loading  # type: ignore[attr-defined]

    def changed(self: Any) -> None:
        before(self)
        process(self)

    return Patch(
        target=f"{target.__module__}:{target.__name__}.process_after_loading",
        value=changed,
    )


def _scaling_the_block_alone(self: Gemma4Layer) -> None:
    _PROCESS(self)
    self._scalar.fill_(1.0)


def _without_value_norm(*args: Any, of_values: bool = False) -> HeadNorms:
    return HeadNorms(*args)


def _keys_normed_as_values(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, norms: HeadNorms, **others: Any
) -> torch.Tensor:
    v, norms = rms_norm(v, norms.k, norms.eps), norms._replace(of_values=False)
    return qk_norm_rope_store(q, k, v, *args, norms=norms, **others)


def _without_router_norm(
    x: torch.Tensor, residual: torch.Tensor, norms: Sequence[Norm], *args: Any, **options: Any
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Passes the sum to the router without a norm."""
    outputs, total = fused_add_norm(x, residual, norms, *args, **options)
    if len(norms) < 3:
        return outputs, total
    _, summed = fused_add_norm(x, residual, (), *args, x_weight=options["x_weight"])
    return (outputs[0], summed * norms[1].weight, outputs[2]), total


def _behind_the_mlp(self: Gemma4Layer, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Passes the MLP's output to the experts."""
    mlp_output, experts = self.mlp.forward(inputs[0]), self._experts
    if experts is None:
        return (mlp_output,)
    eps = self.norms[-1].eps
    return mlp_output, experts.forward(
        [rms_norm(mlp_output, norm.weight, eps) for norm in experts.norms()]
    )


def _with_swapped_norms(self: ParallelExperts, *args: Any) -> torch.Tensor:
    with swapped_for(self, _norms=self._norms[::-1]):
        return _ADD(self, *args)


def with_unused_keys(tensors: dict[str, torch.Tensor], _: Any) -> dict[str, torch.Tensor]:
    """Adds keys and values of all layers, including those that read other layers' caches, as in
    released checkpoints."""
    parts = ("k_proj", "v_proj", "k_norm")
    unused = {
        name.replace("q_proj", part): torch.zeros(1)
        for name in tensors
        for part in parts
        if name.endswith("self_attn.q_proj.weight")
    }
    return {**unused, **tensors}


def _from_the_first(kinds: tuple[str, ...], num_shared: int) -> dict[int, int]:
    """Makes layers read the caches of the first layers of their type."""
    return {layer: kinds.index(kinds[layer]) for layer in range(len(kinds))[-num_shared:]}


def _read_otherwise(**change: Any) -> Patch:
    """Changed options of layers that read other layers' caches."""
    return Patch(
        target="worker.models.architectures.gemma4:SharedCacheAttention",
        value=lambda *args, **own: SharedCacheAttention(*args, **{**own, **change}),
    )


def _without_query_norm(self: SharedCacheAttention, *args: Any) -> torch.Tensor:
    with swapped_for(self, q_norm=None):
        return _SHARED(self, *args)


def _embedded(change: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]) -> Patch:
    return Patch(
        target="worker.models.layers.per_layer_embedding:PerLayerEmbedding.forward", value=change
    )


_SHARED, _EMBEDDED = SharedCacheAttention.forward, PerLayerEmbedding.forward
PER_LAYER_MUTATIONS: dict[str, Mutation] = {
    "source of caches": Patch(
        target="worker.models.config.vendors.google:shared_caches", value=_from_the_first
    ),
    "scale of shared attention": _read_otherwise(scale=0.5),
    "norm of shared queries": Patch(
        target="worker.models.layers.shared_cache:SharedCacheAttention.forward",
        value=_without_query_norm,
    ),
    "embeddings of layers": _embedded(lambda *args: _EMBEDDED(*args).flip(1)),
    "embeddings of tokens": _embedded(lambda own, ids, x: _EMBEDDED(own, ids * 0, x)),
    "projection of embeddings": _embedded(lambda own, ids, x: _EMBEDDED(own, ids, x * 0)),
    "norm of the projection": _packed(PerLayerEmbedding, lambda own: own._norm.weight.fill_(1.0)),
    "activation of embeddings": Patch(
        target="worker.models.architectures.gemma4:gelu_and_mul", value=silu_and_mul
    ),
}
"""Mutations of layers with per-layer embeddings that read other layers' caches."""
_ADD, _PROCESS = ParallelExperts.add, Gemma4Layer.process_after_loading

_UNIFIED = Specimen(
    name="Gemma4Unified",
    config="Gemma4UnifiedText",
    settings={
        **_TEXT,
        "num_hidden_layers": 4,
        "layer_types": _TURN * 2,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "final_logit_softcapping": 5.0,
    },
    mutations={
        "scale of embeddings": NO_EMBEDDING_SCALE,
        "activation": SILU,
        "norms of heads": NO_HEAD_NORMS,
        "cap of logits": {"final_logit_softcapping": None},
        "values": {"attention_k_eq_v": False},
        "heads": {"per_layer_config": None},
        "theta": _full_rope(rope_theta=30.0),
        **_WINDOW_PLUS_1,
    },
    is_variant=True,
)
_SMALL = Specimen(
    name="Gemma4",
    covers=("positions", "shards"),
    config="Gemma4Text",
    settings={
        **_TEXT,
        "num_hidden_layers": 6,
        "layer_types": [*["sliding_attention"] * 3, "full_attention", *_TURN],
        "num_key_value_heads": 2,
        "hidden_size_per_layer_input": 24,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "final_logit_softcapping": 5.0,
    },
    rewrite=with_unused_keys,
    mutations={
        **PER_LAYER_MUTATIONS,
        "scalar of layers": _packed(Gemma4Layer, lambda layer: layer._scalar.fill_(1.0)),
        "scalar of residuals": Patch(
            target="worker.models.architectures.gemma4:Gemma4Layer.process_after_loading",
            value=_scaling_the_block_alone,
        ),
        "theta": _full_rope(rope_theta=30.0),
        **_WINDOW_PLUS_1,
        "eps": {"rms_norm_eps": 0.1},
    },
)
GEMMA4_SPECIMENS: dict[str, Specimen] = {
    "gemma4": Specimen(
        name="Gemma4",
        covers=("shards",),
        config="Gemma4Text",
        settings={
            **_TEXT,
            "num_hidden_layers": 4,
            "layer_types": _TURN * 2,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 40,
            "final_logit_softcapping": 5.0,
        },
        mutations={
            "scale of embeddings": NO_EMBEDDING_SCALE,
            "activation": SILU,
            "activation of experts": Patch(
                target="worker.models.architectures.gemma4:GELU", value=Activation("silu")
            ),
            "norms of heads": NO_HEAD_NORMS,
            "norm of values": Patch(
                target="worker.models.layers.attention:HeadNorms", value=_without_value_norm
            ),
            "normed keys as values": Patch(
                target="worker.models.layers.attention:qk_norm_rope_store",
                value=_keys_normed_as_values,
            ),
            "scale of attention": Patch(
                target="worker.models.architectures.gemma4:AttentionTraits",
                value=lambda **traits: AttentionTraits(**{**traits, "scale": 0.5}),
            ),
            "scalar of layers": _packed(Gemma4Layer, lambda layer: layer._scalar.fill_(1.0)),
            "scalar of residuals": Patch(
                target="worker.models.architectures.gemma4:Gemma4Layer.process_after_loading",
                value=_scaling_the_block_alone,
            ),
            "scale of the router": _packed(Gemma4Router, lambda own: own._scale.fill_(1.0)),
            "norm of the router": Patch(
                target="worker.models.architectures.gemma4:fused_add_norm",
                value=_without_router_norm,
            ),
            "scale of experts": _packed(
                Gemma4Router, lambda own: own._weight_of_experts.fill_(1.0)
            ),
            "number of experts": {"top_k_experts": 2},
            "experts": {"enable_moe_block": False},
            "experts behind the MLP": Patch(
                target="worker.models.architectures.gemma4:Gemma4Layer.run_blocks",
                value=_behind_the_mlp,
            ),
            "norms beside": Patch(
                target="worker.models.architectures.gemma4:ParallelExperts.add",
                value=_with_swapped_norms,
            ),
            "cap of logits": {"final_logit_softcapping": None},
            "values": {"attention_k_eq_v": False},
            "heads": {"per_layer_config": None},
            "share that rotates": _full_rope(partial_rotary_factor=1.0),
            "theta": _full_rope(rope_theta=30.0),
            "part that rotates": Patch(
                target="worker.models.architectures.decoder:cos_sin_table", value=_table_of_a_part
            ),
            **_WINDOW_PLUS_1,
            "eps": {"rms_norm_eps": 0.1},
        },
    ),
    "gemma4-images": Specimen(
        name="Gemma4",
        is_variant=True,
        config="Gemma4Text",
        settings={
            **_TEXT,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "use_bidirectional_attention": "vision",
        },
        mutations={"names": NO_NAMES, **_WINDOW_PLUS_1},
        multimodal="Gemma4",
    ),
    "gemma4-small": _SMALL,
    "gemma4-small-moe": replace(
        _SMALL,
        settings={
            **_SMALL.settings,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 40,
        },
        mutations={"number of experts": {"top_k_experts": 2}},
        is_variant=True,
        covers=(),
    ),
    "gemma4-small-images": replace(
        _SMALL,
        mutations={"names": NO_NAMES, **_WINDOW_PLUS_1},
        multimodal="Gemma4",
        is_variant=True,
        covers=(),
    ),
    "gemma4-unified": _UNIFIED,
    "gemma4-unified-images": replace(
        _UNIFIED,
        mutations={"names": NO_NAMES, **_WINDOW_PLUS_1},
        multimodal="Gemma4Unified",
        is_variant=True,
    ),
}
