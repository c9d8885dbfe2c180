"""Schemas of Ling 2 and LLaDA 2 (huggingface.co/inclusionAI). Does not import torch."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from worker.models.config.family import FamilyConfig, blocks, rotary_size
from worker.models.config.moe_config import MoeConfig
from worker.models.config.schema import ROUTER_KEYS, Count, Index, Number, Yes, words


class BailingMoeV2Config(FamilyConfig):
    """Ling and Ring 2: experts in all but the first few layers, with DeepSeek V3's router."""

    architecture = "BailingMoeV2ForCausalLM"
    model_types: ClassVar[tuple[str, ...]] = ("bailing_moe", "bailing_moe_v2")
    implementation = "ling2:BailingMoeV2ForCausalLM"
    harmless = ROUTER_KEYS | words(
        """
        sliding_window moe_shared_expert_intermediate_size embedding_dropout output_dropout
        mtp_loss_scaling_factor num_nextn_predict_layers
        """
    )
    """`sliding_window` has no effect unless use_sliding_window is set, which is not supported."""
    aliases = (("num_local_experts", "num_experts"),)
    skips_next_layers = True

    max_position_embeddings: Count = 32768
    num_key_value_heads: Count | None = 4
    head_dim: Count | None = 128
    partial_rotary_factor: Number = 0.5
    rotary_dim: Count | None = None
    use_qk_norm: Yes = True
    use_rmsnorm: Yes = True
    num_experts: Count = 256
    num_experts_per_tok: Count = 8
    moe_intermediate_size: Count = 512
    num_shared_experts: Index = 1
    moe_router_enable_shared_expert: Yes = True
    moe_router_enable_expert_bias: bool = True
    n_group: Index = 8
    topk_group: Index = 4
    first_k_dense_replace: Index = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: Number = 2.5
    score_function: Literal["sigmoid"] = "sigmoid"
    router_dtype: Literal["fp32"] = "fp32"

    def rotary_size(self) -> int:
        """Number of leading dimensions per head that have rotary embedding."""
        return rotary_size(self, self.rotary_dim)

    def moe(self) -> MoeConfig:
        """Experts in all but the first few layers."""
        return MoeConfig(
            num_experts=self.num_experts,
            top_k=self.num_experts_per_tok,
            intermediate_size=self.moe_intermediate_size,
            dense_layers=frozenset(range(self.first_k_dense_replace)),
            normalize=self.norm_topk_prob,
            sigmoid=True,
            has_bias=self.moe_router_enable_expert_bias,
            num_groups=self.n_group,
            top_k_groups=self.topk_group,
            scale=self.routed_scaling_factor,
            shared_size=self.moe_intermediate_size * self.num_shared_experts,
        )


class LLaDA2MoeConfig(BailingMoeV2Config):
    """LLaDA 2: Ling 2 trained for block diffusion. In 2.2, there are no groups of experts: the
    tokens of a block choose among the same few experts (`expert_capacity`)."""

    architecture = "LLaDA2MoeModelLM"
    model_types = ("llada2_moe",)

    block_size: Count = 32
    mask_token_id: Index = 156895
    expert_capacity: Count | None = None
    delete_token_id: Index | None = None
    split_token_id: Index | None = None

    def block_diffusion(self) -> tuple[int, int]:
        """Block size and mask token."""
        return blocks(self.block_size, self.mask_token_id, self.vocab_size)

    def edit_tokens(self) -> tuple[int, int] | None:
        """Tokens for deletion and insertion (2.2 only)."""
        if self.delete_token_id is None or self.split_token_id is None:
            return None
        tokens = self.delete_token_id, self.split_token_id
        if len({self.mask_token_id, *tokens}) < 3 or max(tokens) >= self.vocab_size:
            raise ValueError(
                f"delete_token_id and split_token_id = {tokens} in config.json must be two tokens "
                f"of the vocabulary that differ from mask_token_id {self.mask_token_id}: fix them"
            )
        return tokens

    def moe(self) -> MoeConfig:
        """Experts in all but the first few layers, chosen from the best groups or, with
        `expert_capacity`, from the experts of the token's block."""
        moe, capacity = super().moe(), self.expert_capacity
        if capacity is None:
            return moe
        if not self.num_experts_per_tok <= capacity <= self.num_experts:
            raise ValueError(
                f"expert_capacity {capacity} in config.json must be in "
                f"[{self.num_experts_per_tok}, {self.num_experts}]: fix it"
            )
        if not self.norm_topk_prob:
            raise ValueError(
                "norm_topk_prob in config.json must be true if expert_capacity is set: set it to "
                "true"
            )
        return replace(
            moe,
            num_groups=1,
            top_k_groups=1,
            block_size=self.block_size,
            block_capacity=capacity,
        )


FAMILIES = (LLaDA2MoeConfig, BailingMoeV2Config)
