"""Checkpoints of MiniMax-M3, whose attention is block-sparse, and mutations that break each of its
features."""

from __future__ import annotations

import re
from typing import Any

import torch

from kernels import BlockSelection, select_blocks, store_index_keys
from tests.support.checkpoints.mutations import NO_NORM_OFFSET, NO_ROUTER_BIAS, NO_SHARED_EXPERT
from tests.support.checkpoints.specimen import Mutation, Patch, Specimen
from worker.models.layers.norms import RMSNorm

_ROPE = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
_CLASS = "worker.models.architectures.minimax_m3"
_MOE = re.compile(r"(model\.layers\.\d+)\.mlp\.(gate|experts|shared_experts)\.(.*)")


def _as_released(_: dict[str, torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
    """Renames tensors as in the released checkpoint; transformers only does so when it saves the
    model together with an encoder."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        name = name.replace(".indexer.", ".index_")
        if match := _MOE.fullmatch(name):
            layer, block, part = match.groups()
            name = f"{layer}.block_sparse_moe.{block}.{part}"
            name = name.replace(".gate.e_score", ".e_score")
        if name.endswith("experts.gate_up_proj") or name.endswith("experts.down_proj"):
            prefix, kind = name.rsplit(".", 1)
            for expert, own in enumerate(tensor):
                parts = own.chunk(2) if kind == "gate_up_proj" else [own]
                for part, weight in zip(
                    ("w1", "w3") if len(parts) > 1 else ("w2",), parts, strict=True
                ):
                    tensors[f"{prefix}.{expert}.{part}.weight"] = weight
        elif name.endswith(".gate_up_proj.weight"):
            for part, weight in zip(("gate_proj", "up_proj"), tensor.chunk(2), strict=True):
                tensors[name.replace("gate_up_proj", part)] = weight
        else:
            tensors[name] = tensor
    return tensors


def _within_a_wrapper(tensors: dict[str, torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
    released = _as_released(tensors, model)
    return {f"language_model.{name}": tensor for name, tensor in released.items()}


def _by_the_first_head(*args: Any, **options: Any) -> BlockSelection:
    selection = select_blocks(*args, **options)
    runs = selection.runs
    return selection._replace(runs=runs[:, :1].expand_as(runs).contiguous())


def _without_rotation(*args: Any, positions: torch.Tensor, **options: Any) -> None:
    store_index_keys(*args, positions=torch.zeros_like(positions), **options)


_SETTINGS = {
    "rope_parameters": _ROPE,
    "rotary_dim": 8,
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    "index_n_heads": 2,
    "index_head_dim": 20,
    "index_block_size": 12,
    "index_topk_blocks": 2,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "dense_intermediate_size": 40,
    "shared_intermediate_size": 24,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.7,
    "swiglu_alpha": 1.3,
    "swiglu_limit": 0.9,
}
"""Blocks that are not multiples of pages, so that a page can belong to two blocks."""
_MUTATIONS: dict[str, Mutation] = {
    "number of blocks": {"index_topk_blocks": 3},
    "size of blocks": {"index_block_size": 8},
    "selections of KV heads": Patch(target=f"{_CLASS}:select_blocks", value=_by_the_first_head),
    "rotation of index keys": Patch(target=f"{_CLASS}:store_index_keys", value=_without_rotation),
    "norms of the indexer": Patch(
        target=f"{_CLASS}:RMSNorm", value=lambda size, eps, options, _: RMSNorm(size, eps, options)
    ),
    "norms of heads": Patch(
        target=f"{_CLASS}:BlockSparseAttention._head_norms", value=lambda _: None
    ),
    "weights from 0": NO_NORM_OFFSET,
    "alpha": {"swiglu_alpha": 1.702},
    "limit": {"swiglu_limit": 7.0},
    "shared expert": NO_SHARED_EXPERT,
    "bias of the router": NO_ROUTER_BIAS,
    "number of experts": {"num_experts_per_tok": 2},
    "scale of experts": {"routed_scaling_factor": 1.0},
    "theta": {"rope_parameters": {**_ROPE, "rope_theta": 300.0}},
    "eps": {"rms_norm_eps": 0.1},
}
BLOCK_SPARSE_SPECIMENS: dict[str, Specimen] = {
    "minimax-m3": Specimen(
        name="MiniMaxM3VL",
        config="MiniMaxM3VLText",
        covers=("positions", "shards"),
        architecture="MiniMaxM3SparseForCausalLM",
        settings=_SETTINGS,
        mutations=_MUTATIONS,
        rewrite=_as_released,
    ),
    "minimax-m3-images": Specimen(
        name="MiniMaxM3VL",
        config="MiniMaxM3VLText",
        is_variant=True,
        architecture="MiniMaxM3SparseForConditionalGeneration",
        wrapper="minimax_m3_vl",
        settings={**_SETTINGS, "layer_types": ["minimax_m3_sparse"] * 3},
        mutations={"number of blocks": {"index_topk_blocks": 3}, "eps": {"rms_norm_eps": 0.1}},
        rewrite=_within_a_wrapper,
    ),
}
