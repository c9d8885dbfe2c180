"""Checkpoints of block-diffusion families that transformers does not support, and mutations that
break each of their features."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kernels import Routing
from tests.support.checkpoints import sdar
from tests.support.checkpoints.moe import (
    LLADA2,
    MASK,
    SDAR_MOE,
    MoeCheckpoint,
    reference_logits,
    write_moe,
)
from tests.support.checkpoints.mutations import (
    NO_HEAD_NORMS,
    NO_ROUTER_BIAS,
    NO_SHARED_EXPERT,
)
from tests.support.checkpoints.specimen import Mutation, Patch
from worker.models.config.moe_config import MoeConfig
from worker.models.layers.moe import routing_of


@dataclass(frozen=True, kw_only=True)
class BlockSpecimen:
    """A family's checkpoint."""

    write: Callable[[Path], MoeCheckpoint]
    """Saves the checkpoint."""
    mask: int
    """Mask token of undecided positions."""
    ends: Sequence[int]
    """Tokens that end a request."""
    mutations: Mapping[str, Mutation]
    """Mutations, keyed by feature."""


@dataclass(frozen=True, kw_only=True)
class BlockCheckpoint:
    """A saved checkpoint."""

    folder: Path
    specimen: BlockSpecimen
    plain: MoeCheckpoint
    """Checkpoint for the reference, which also computes layers without experts."""

    @property
    def block_size(self) -> int:
        size = self.plain.config["block_size"]
        assert isinstance(size, int)
        return size

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits [positions, vocabulary] of whole blocks with block-causal attention."""
        return reference_logits(self.plain, token_ids)


def write_blocks(architecture: str, folder: Path) -> BlockCheckpoint:
    """Saves the checkpoint of the family with this value of `architectures`."""
    specimen = BLOCK_SPECIMENS[architecture]
    return BlockCheckpoint(folder=folder, specimen=specimen, plain=specimen.write(folder))


def _shares_of_all(moe: MoeConfig) -> Routing:
    return replace(routing_of(moe), scoring="softmax")


_COMMON: dict[str, Mutation] = {
    "blocks": {"block_size": 2},
    "mask": {"mask_token_id": 11},
    "theta": {"rope_theta": 300.0},
    "eps": {"rms_norm_eps": 0.1},
    "norms of heads": NO_HEAD_NORMS,
}
_EXPERTS: dict[str, Mutation] = {
    "number of experts": {"num_experts_per_tok": 2},
    "sum of weights": {"norm_topk_prob": False},
}
BLOCK_SPECIMENS = {
    "SDARForCausalLM": BlockSpecimen(
        write=lambda folder: sdar.write_sdar(folder, 4).plain,
        mask=sdar.MASK,
        ends=sdar.EOS,
        mutations=_COMMON,
    ),
    "SDARMoeForCausalLM": BlockSpecimen(
        write=lambda folder: write_moe(SDAR_MOE, folder),
        mask=MASK,
        ends=(2,),
        mutations={**_COMMON, **_EXPERTS, "all layers": {"mlp_only_layers": [1]}},
    ),
    "LLaDA2MoeModelLM": BlockSpecimen(
        write=lambda folder: write_moe(LLADA2, folder),
        mask=MASK,
        ends=(2,),
        mutations={
            **_COMMON,
            **_EXPERTS,
            "partial": {"partial_rotary_factor": 1.0, "rotary_dim": 16},
            "groups": {"topk_group": 2},
            "scale of experts": {"routed_scaling_factor": 1.0},
            "first layer": {"first_k_dense_replace": 0},
            "bias of the router": NO_ROUTER_BIAS,
            "shared expert": NO_SHARED_EXPERT,
            "scores of experts": Patch(
                target="worker.models.layers.moe:routing_of", value=_shares_of_all
            ),
        },
    ),
}
"""Test checkpoints, keyed by value of `architectures`."""
