"""Schemas of LFM2 (huggingface.co/LiquidAI). Does not import torch."""

from __future__ import annotations

from typing import Any, ClassVar

from worker.models.config.family import FULL, LINEAR, FamilyConfig
from worker.models.config.moe_config import MoeConfig
from worker.models.config.multimodal import VISION_AND_PROJECTOR, MultimodalConfig
from worker.models.config.schema import ROUTER_KEYS, Count, Index, Number, Yes, words


class _ConvolutionConfig(FamilyConfig):
    """Keys of LFM2: most layers have a short convolution, and the others have attention."""

    layer_kinds = (FULL, LINEAR)
    kind_aliases: ClassVar[dict[str, str]] = {"conv": LINEAR}
    aliases = (("block_ff_dim", "intermediate_size"), ("tie_embedding", "tie_word_embeddings"))
    harmless = words(
        """
        block_dim block_mlp_init_scale block_norm_eps block_out_init_scale block_use_swiglu
        block_use_xavier_init conv_dim conv_dim_out conv_use_xavier_init num_heads use_pos_enc
        """
    )
    extra_keys = ("conv_L_cache", "conv_bias")

    num_key_value_heads: Count | None = 8
    max_position_embeddings: Count = 128000
    norm_eps: Number = 1e-5
    tie_word_embeddings: bool = True
    eos_token_id: Any = 2
    rope_theta: Number = 1000000.0
    use_qk_norm: Yes = True
    conv_bias: bool = False
    conv_L_cache: Count = 3
    """Kernel size of the convolution: number of consecutive tokens that an output depends on."""

    def derive(self) -> None:
        """Sets the epsilon of norms."""
        self.rms_norm_eps = self.norm_eps

    def divided(self) -> dict[str, int]:
        """The number of channels of the convolutions, which are divided among the ranks."""
        return {"the number of channels of convolutions": self.hidden_size}


class Lfm2Config(_ConvolutionConfig):
    """Schema of dense LFM2."""

    architecture = "Lfm2ForCausalLM"
    model_types = ("lfm2",)
    implementation = "lfm2:Lfm2ForCausalLM"

    block_multiple_of: Count = 256
    block_ffn_dim_multiplier: Number | None = 1.0
    block_auto_adjust_ff_dim: bool = True
    full_attn_idxs: list[Index] | None = None
    """Layers with attention if `layer_types` is missing; all layers if neither key is set."""

    def derive(self) -> None:
        """Sets the epsilon of norms and, unless `block_auto_adjust_ff_dim` is false, the
        intermediate size: two thirds of the configured one, multiplied and rounded up as
        configured."""
        super().derive()
        if not self.block_auto_adjust_ff_dim:
            return
        size = int(2 * self.intermediate_size / 3)
        if self.block_ffn_dim_multiplier is not None:
            size = int(self.block_ffn_dim_multiplier * size)
            size = -(-size // self.block_multiple_of) * self.block_multiple_of
        self.intermediate_size = size

    def layer_kind(self, index: int) -> str:
        """Attention in the layers that `full_attn_idxs` lists."""
        attending = self.full_attn_idxs
        return FULL if attending is None or index in attending else LINEAR


class Lfm2MoeConfig(_ConvolutionConfig, kw_only=True):
    """LFM2 with experts in all but the first few layers."""

    architecture = "Lfm2MoeForCausalLM"
    model_types = ("lfm2_moe",)
    implementation = "lfm2:Lfm2MoeForCausalLM"
    harmless = _ConvolutionConfig.harmless | ROUTER_KEYS

    layer_types: list[str]
    num_experts: Count = 32
    num_experts_per_tok: Count = 4
    moe_intermediate_size: Count = 1792
    num_dense_layers: Index = 2
    use_expert_bias: bool = True
    norm_topk_prob: bool = True
    routed_scaling_factor: Number = 1.0

    def moe(self) -> MoeConfig:
        """Experts, scored by sigmoids."""
        return MoeConfig(
            num_experts=self.num_experts,
            top_k=self.num_experts_per_tok,
            intermediate_size=self.moe_intermediate_size,
            dense_layers=frozenset(range(min(self.num_dense_layers, self.num_hidden_layers))),
            normalize=self.norm_topk_prob,
            sigmoid=True,
            has_bias=self.use_expert_bias,
            scale=self.routed_scaling_factor,
        )


FAMILIES = (Lfm2Config, Lfm2MoeConfig)
MULTIMODAL = (
    MultimodalConfig(
        architectures=("Lfm2VlForConditionalGeneration",),
        model_type="lfm2_vl",
        texts={"lfm2": "Lfm2ForCausalLM", "lfm2_moe": "Lfm2MoeForCausalLM"},
        keys=words(
            """
            vision_config image_token_id image_token_index downsample_factor projector_hidden_act
            projector_hidden_size projector_bias projector_use_layernorm use_image_special_tokens
            do_image_splitting encoder_patch_size max_image_tokens max_num_patches max_tiles
            max_pixels_tolerance min_image_tokens min_tiles tile_size use_thumbnail
            vision_feature_layer
            """
        ),
        tensors=VISION_AND_PROJECTOR,
    ),
)
