"""Schemas of MiniMax-M2 and M3 (huggingface.co/MiniMaxAI). Does not import torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from worker.models.config.block_config import BlockSparseConfig
from worker.models.config.family import FULL, FamilyConfig, rotary_size
from worker.models.config.moe_config import MoeConfig, listed_dense_layers
from worker.models.config.multimodal import MultimodalConfig, TensorNames
from worker.models.config.schema import (
    ROUTER_KEYS,
    Count,
    Index,
    No,
    Number,
    Yes,
    only,
    short,
    words,
)
from worker.protocol.analyzed import analyzed

_SPARSE = "minimax_m3_sparse"
"""Layer type with block-sparse attention in `layer_types`."""


class MiniMaxM2Config(FamilyConfig):
    """MiniMax-M2: QK norm over all heads together, rotary embedding in part of each head, and
    experts in all layers."""

    architecture = "MiniMaxM2ForCausalLM"
    model_types = ("minimax_m2",)
    implementation = "minimax_m2:MiniMaxM2ForCausalLM"
    harmless = ROUTER_KEYS | words(
        "use_mtp num_mtp_modules mtp_transformer_layers router_jitter_noise"
    )

    max_position_embeddings: Count = 196608
    num_key_value_heads: Count | None = 8
    head_dim: Count | None = 128
    partial_rotary_factor: Number | None = None
    rotary_dim: Count | None = None
    rope_theta: Number = 5000000.0
    eos_token_id: Any = 200020
    attn_type_list: list[int] | None = None
    use_qk_norm: Yes = True
    qk_norm_type: Literal["per_layer"] = "per_layer"
    num_local_experts: Count = 256
    num_experts_per_tok: Count = 8
    scoring_func: Literal["sigmoid"] = "sigmoid"
    use_routing_bias: Yes = True

    def derive(self) -> None:
        """Raises ValueError unless all layers have full attention (1), not linear attention (0)."""
        kinds, count = self.attn_type_list, self.num_hidden_layers
        if kinds is not None and kinds != [1] * count:
            raise ValueError(
                f"attn_type_list = {short(kinds)} in config.json is not supported: it must be 1 "
                f"for each of the {count} layers; use another checkpoint"
            )

    def rotary_size(self) -> int:
        """Number of leading dimensions per head that have rotary embedding."""
        return rotary_size(self, self.rotary_dim)

    def moe(self) -> MoeConfig:
        """Experts in all layers, scored by sigmoids; a bias is added only for the selection."""
        return MoeConfig(
            num_experts=self.num_local_experts,
            top_k=self.num_experts_per_tok,
            intermediate_size=self.intermediate_size,
            sigmoid=True,
            has_bias=True,
        )


class _SparseAttention(msgspec.Struct, forbid_unknown_fields=True):
    """`sparse_attention_config`: sizes of the indexer and of blocks, and the layers with sparse
    attention."""

    sparse_attention_freq: list[Literal[0, 1]]
    """1 for each layer with sparse attention, otherwise 0."""
    sparse_num_index_heads: Count
    sparse_index_dim: Count
    sparse_block_size: Count
    sparse_topk_blocks: Count
    sparse_local_block: Literal[1] = 1
    sparse_init_block: Literal[0] = 0
    sparse_score_type: Literal["max"] = "max"
    use_sparse_attention: Yes = True
    sparse_disable_index_value: list[Literal[0, 1]] | None = None
    """1 for each layer whose indexer has no values, which must be all layers with sparse attention;
    otherwise 0."""


class MiniMaxM3Config(FamilyConfig):
    """The language model of MiniMax-M3: block-sparse attention and experts in all but the first few
    layers."""

    architecture = "MiniMaxM3SparseForCausalLM"
    other_architectures = ("MiniMaxM3VLForCausalLM",)
    model_types = ("minimax_m3_vl_text", "minimax_m3_text")
    implementation = "minimax_m3:MiniMaxM3ForCausalLM"
    harmless = ROUTER_KEYS | words("num_mtp_modules num_nextn_predict_layers router_jitter_noise")
    aliases = (("num_experts", "num_local_experts"),)
    extra_keys = ("dense_intermediate_size", "swiglu_alpha", "swiglu_limit")
    layer_kinds = (_SPARSE, FULL)
    skipped = ("mtp.", "model.mtp.")

    max_position_embeddings: Count = 524288
    num_key_value_heads: Count | None = 4
    head_dim: Count | None = 128
    partial_rotary_factor: Number | None = None
    rotary_dim: Count | None = 64
    rope_theta: Number = 5000000.0
    eos_token_id: Any = 200020
    hidden_act: Annotated[str, only("swigluoai", "silu")] = "silu"
    """Unused: the activation is a clamped SwiGLU."""
    swiglu_alpha: Number = 1.702
    swiglu_limit: Number = 7.0
    use_gemma_norm: Yes = True
    """Whether norms multiply by 1 + weight."""
    use_qk_norm: Yes = True
    qk_norm_type: Literal["per_head"] = "per_head"
    attention_output_gate: No = False
    dense_intermediate_size: Count = 12288
    shared_intermediate_size: Index = 3072
    n_shared_experts: Literal[1] = 1
    num_local_experts: Count = 128
    num_experts_per_tok: Count = 4
    routed_scaling_factor: Number = 2.0
    scoring_func: Literal["sigmoid"] = "sigmoid"
    use_routing_bias: Yes = True
    moe_layer_freq: list[Literal[0, 1]] | None = None
    """1 for each layer with experts, otherwise 0; read if `mlp_layer_types` is missing."""
    sparse_attention_config: dict[str, Any] | None = None
    """Sizes and layers of sparse attention, for which transformers writes `layer_types` and the
    next five fields instead."""
    index_n_heads: Count = 4
    index_head_dim: Count = 128
    index_block_size: Count = 128
    index_topk_blocks: Count = 16
    index_local_blocks: Literal[1] = 1

    def derive(self) -> None:
        """Reads `sparse_attention_config` and `moe_layer_freq`."""
        flags, count = self.moe_layer_freq, self.num_hidden_layers
        if flags is not None and len(flags) != count:
            raise ValueError(
                f"moe_layer_freq = {short(flags)} in config.json must have 0 or 1 for each of the "
                f"{count} layers: fix it"
            )
        if flags is not None and self.mlp_layer_types is None:
            self.mlp_layer_types = ["sparse" if has_experts else "dense" for has_experts in flags]
        table = self.sparse_attention_config
        if table is not None:
            self._set_sparse(table)
        if self.index_n_heads != self.kv_heads():
            raise ValueError(
                f"num_key_value_heads is {self.kv_heads()}, but the indexer has "
                f"{self.index_n_heads} heads (index_n_heads or sparse_num_index_heads): make them "
                "equal in config.json"
            )

    def _set_sparse(self, table: dict[str, Any]) -> None:
        """Sets `layer_types` and the sizes of sparse attention from `sparse_attention_config`;
        raises ValueError if it is malformed or contradicts `layer_types`."""
        key = "sparse_attention_config"
        try:
            sparse = msgspec.convert(table, analyzed(_SparseAttention))
        except msgspec.ValidationError as error:
            raise ValueError(
                f"{key} = {short(table)} in config.json is not supported: it must have the keys "
                f"and values of MiniMax-M3 ({error}); use another checkpoint"
            ) from None
        layers = sparse.sparse_attention_freq
        if sparse.sparse_disable_index_value not in (None, layers):
            raise ValueError(
                f"sparse_disable_index_value of {key} in config.json is not supported: it must be "
                "1 for each layer with sparse attention; use another checkpoint"
            )
        kinds = [_SPARSE if is_sparse else FULL for is_sparse in layers]
        if self.layer_types not in (None, kinds):
            raise ValueError(f"layer_types and {key} in config.json disagree: make them consistent")
        self.layer_types = kinds
        self.index_n_heads = sparse.sparse_num_index_heads
        self.index_head_dim = sparse.sparse_index_dim
        self.index_block_size = sparse.sparse_block_size
        self.index_topk_blocks = sparse.sparse_topk_blocks

    def block_sparse(self) -> BlockSparseConfig:
        """Block-sparse attention, in the layers that `layer_types` lists as such."""
        return BlockSparseConfig(
            block_size=self.index_block_size,
            num_blocks=self.index_topk_blocks,
            head_dim=self.index_head_dim,
            layers=tuple(kind == _SPARSE for kind in self.kinds_of_layers()),
        )

    def divided(self) -> dict[str, int]:
        """The intermediate size of dense layers' MLPs, which are divided among the ranks."""
        return {"the size of dense MLPs": self.dense_intermediate_size}

    def rotary_size(self) -> int:
        """Number of leading dimensions per head that have rotary embedding."""
        size = rotary_size(self, self.rotary_dim)
        if size > self.index_head_dim:
            raise ValueError(
                f"the number of rotary dimensions in config.json ({size}) exceeds the indexer's "
                f"head size ({self.index_head_dim}): fix it"
            )
        return size

    def moe(self) -> MoeConfig:
        """Experts, scored by sigmoids with a bias for the selection, and a shared expert."""
        return MoeConfig(
            num_experts=self.num_local_experts,
            top_k=self.num_experts_per_tok,
            intermediate_size=self.intermediate_size,
            dense_layers=listed_dense_layers(
                self.mlp_layer_types, self.num_hidden_layers, None, default=0
            ),
            sigmoid=True,
            has_bias=True,
            scale=self.routed_scaling_factor,
            shared_size=self.shared_intermediate_size,
        )


FAMILIES = (MiniMaxM2Config, MiniMaxM3Config)
MULTIMODAL = (
    MultimodalConfig(
        architectures=("MiniMaxM3SparseForConditionalGeneration",),
        model_type="minimax_m3_vl",
        texts=dict.fromkeys(
            ("minimax_m3_vl_text", "minimax_m3_text", "MiniMaxM3SparseForCausalLM"),
            "MiniMaxM3SparseForCausalLM",
        ),
        keys=words(
            """
            vision_config image_token_index video_token_index image_token_id video_token_id
            image_grid_pinpoints image_seq_length img_token_compression_config process_image_mode
            multimodal_projector_bias projector_hidden_act projector_hidden_size
            vision_feature_layer vision_feature_select_strategy
            """
        ),
        tensors=TensorNames(
            renamed=(("language_model.", ""),),
            skipped=("vision_tower.", "multi_modal_projector.", "patch_merge_mlp."),
        ),
    ),
)
