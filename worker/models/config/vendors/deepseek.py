"""Schemas of DeepSeek (huggingface.co/deepseek-ai) and Kimi K2 (huggingface.co/moonshotai), which
has the same layers. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from worker.models.config.family import FULL, FamilyConfig
from worker.models.config.latent_family import LatentFamilyConfig
from worker.models.config.mla_config import IndexerConfig
from worker.models.config.moe_config import MoeConfig, grouped_experts, listed_dense_layers
from worker.models.config.mtp_config import MtpConfig
from worker.models.config.multimodal import MultimodalConfig, language_model_and
from worker.models.config.schema import (
    ROUTER_KEYS,
    Count,
    Index,
    No,
    Number,
    Yes,
    only,
    words,
)

TRAINING = ROUTER_KEYS | words("aux_loss_alpha ep_size seq_aux")
NEXT_LAYERS = words("num_mtp_layers num_nextn_predict_layers")


class DeepseekConfig(FamilyConfig, kw_only=True):
    """Schema of DeepSeek MoE, DeepSeek's first release with experts."""

    architecture = "DeepseekForCausalLM"
    model_types = ("deepseek",)
    implementation = "qwen3_moe:Qwen3MoeForCausalLM"
    harmless = words("aux_loss_alpha ep_size seq_aux")

    max_position_embeddings: Count = 2048
    eos_token_id: Any = 100001
    attention_bias: bool = False
    n_routed_experts: Count
    num_experts_per_tok: Count
    moe_intermediate_size: Count = 1407
    n_shared_experts: Index = 0
    first_k_dense_replace: Index = 0
    norm_topk_prob: bool = False
    moe_layer_freq: Literal[1] = 1
    scoring_func: Literal["softmax"] = "softmax"

    def moe(self) -> MoeConfig:
        """Experts, chosen by softmax without groups."""
        return MoeConfig(
            num_experts=self.n_routed_experts,
            top_k=self.num_experts_per_tok,
            intermediate_size=self.moe_intermediate_size,
            dense_layers=frozenset(range(self.first_k_dense_replace)),
            normalize=self.norm_topk_prob,
            num_summed=1,
            shared_size=self.moe_intermediate_size * self.n_shared_experts,
        )


class DeepseekV2Config(LatentFamilyConfig, kw_only=True):
    """Schema of DeepSeek V2 and V2 Lite."""

    architecture = "DeepseekV2ForCausalLM"
    model_types = ("deepseek_v2",)
    implementation = "deepseek:DeepseekForCausalLM"
    harmless = TRAINING | NEXT_LAYERS

    max_position_embeddings: Count = 2048
    eos_token_id: Any = 2
    n_routed_experts: Count = 64
    num_experts_per_tok: Count
    moe_intermediate_size: Count = 1407
    n_shared_experts: Index = 2
    n_group: Index | None = None
    topk_group: Index | None = None
    topk_method: Literal["greedy", "group_limited_greedy"] = "greedy"
    first_k_dense_replace: Index = 0
    norm_topk_prob: No = False
    routed_scaling_factor: Number = 1.0
    moe_layer_freq: Literal[1] = 1
    scoring_func: Literal["softmax"] = "softmax"

    def moe(self) -> MoeConfig:
        """Experts, chosen without groups or from the groups with the best experts."""
        is_grouped = self.topk_method == "group_limited_greedy"
        if is_grouped and not (self.n_group and self.topk_group):
            raise ValueError(
                f"n_group {self.n_group} and topk_group {self.topk_group} in config.json must be "
                f"positive integers if topk_method is {self.topk_method}: fix it"
            )
        return MoeConfig(
            num_experts=self.n_routed_experts,
            top_k=self.num_experts_per_tok,
            intermediate_size=self.moe_intermediate_size,
            dense_layers=frozenset(range(self.first_k_dense_replace)),
            normalize=False,
            num_groups=(is_grouped and self.n_group) or 1,
            top_k_groups=(is_grouped and self.topk_group) or 1,
            num_summed=1,
            scale=self.routed_scaling_factor,
            shared_size=self.moe_intermediate_size * self.n_shared_experts,
        )


class DeepseekV3Config(LatentFamilyConfig):
    """Schema of DeepSeek V3 and R1 and of Kimi K2, and the base of other vendors' families with
    these keys."""

    architecture = "DeepseekV3ForCausalLM"
    model_types: ClassVar[tuple[str, ...]] = ("deepseek_v3", "kimi_k2")
    implementation = "deepseek:DeepseekForCausalLM"
    harmless = TRAINING | NEXT_LAYERS
    skips_next_layers = True

    max_position_embeddings: Count = 4096
    num_key_value_heads: Count | None = 128
    eos_token_id: Any = 1
    n_routed_experts: Count = 256
    num_experts_per_tok: Count = 8
    moe_intermediate_size: Count = 2048
    n_shared_experts: Index = 1
    n_group: Index = 8
    topk_group: Index = 4
    first_k_dense_replace: Index = 3
    norm_topk_prob: bool = True
    routed_scaling_factor: Number = 2.5
    moe_layer_freq: Literal[1] = 1
    scoring_func: Literal["sigmoid"] = "sigmoid"
    topk_method: Literal["noaux_tc"] = "noaux_tc"

    def moe(self) -> MoeConfig:
        """Experts in all but the first few layers."""
        return grouped_experts(self, frozenset(range(self.first_k_dense_replace)))

    def mtp(self) -> MtpConfig:
        """The MTP head, stored after the last layer."""
        return MtpConfig.after_layers(self.num_hidden_layers)


class DeepseekV32Config(DeepseekV3Config):
    """DeepSeek V3.2: V3 with sparse attention and an indexer in every layer. transformers lists
    layers with experts in `mlp_layer_types`."""

    architecture = "DeepseekV32ForCausalLM"
    model_types = ("deepseek_v32",)
    kind_aliases: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("indexed_attention", "deepseek_sparse_attention"), FULL
    )

    max_position_embeddings: Count = 163840
    q_lora_rank: Count = 1536
    rope_interleave: Yes = True
    n_group: Index = 8
    first_k_dense_replace: Index = -1
    """Number of leading dense layers. If it is missing (-1), the dense layers are taken from
    `mlp_layer_types`, or are the first three if that is missing too."""
    index_topk: Count = 2048
    index_head_dim: Count = 128
    index_n_heads: Count = 64
    indexer_rope_interleave: Annotated[bool, only(False)] = False
    """Whether the indexer's rotary embedding pairs adjacent dimensions."""

    def moe(self) -> MoeConfig:
        """Experts in all but the first few layers, unless config.json lists others."""
        first = self.first_k_dense_replace
        dense = listed_dense_layers(
            self.mlp_layer_types,
            self.num_hidden_layers,
            None if first == -1 else first,
            default=3,
        )
        return grouped_experts(self, dense)

    def indexer(self) -> IndexerConfig:
        """Sparse attention, with the indexers of `indexer_layers`."""
        if self.index_head_dim < self.qk_rope_head_dim:
            raise ValueError(
                f"index_head_dim {self.index_head_dim} in config.json is less than "
                f"qk_rope_head_dim {self.qk_rope_head_dim}, the number of rotary dimensions: fix it"
            )
        return IndexerConfig(
            top_k=self.index_topk,
            num_heads=self.index_n_heads,
            head_dim=self.index_head_dim,
            is_interleaved=self.indexer_rope_interleave,
            layers=self.indexer_layers(),
        )

    def indexer_layers(self) -> tuple[bool, ...]:
        """Whether each layer has an indexer."""
        return (True,) * self.num_hidden_layers


FAMILIES = (DeepseekConfig, DeepseekV2Config, DeepseekV3Config, DeepseekV32Config)
MULTIMODAL = (
    MultimodalConfig(
        architectures=("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"),
        model_type="kimi_k25",
        texts={"kimi_k2": "DeepseekV3ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM"},
        keys=words(
            """
            vision_config ignore_index media_placeholder_token_id use_unified_vision_chunk
            video_placeholder image_token_id video_token_id vision_start_token_id
            vision_end_token_id projection_hidden_size projection_layer_norm_eps
            """
        ),
        tensors=language_model_and("vision_tower", "mm_projector"),
    ),
)
