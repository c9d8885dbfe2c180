"""Schemas of GLM (huggingface.co/zai-org). Does not import torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from worker.models.config.family import Biases, FamilyConfig
from worker.models.config.moe_config import MoeConfig, grouped_experts, listed_dense_layers
from worker.models.config.mtp_config import MtpConfig
from worker.models.config.multimodal import MultimodalConfig, TensorNames
from worker.models.config.schema import ROUTER_KEYS, Count, Index, Number, only, short, words
from worker.models.config.vendors.deepseek import DeepseekV3Config, DeepseekV32Config


class GlmConfig(FamilyConfig):
    """Schema of the first release of GLM-4."""

    architecture = "GlmForCausalLM"
    model_types = ("glm",)
    implementation = "glm4:GlmForCausalLM"

    max_position_embeddings: Count = 131072
    num_key_value_heads: Count | None = 2
    head_dim: Count | None = 128
    rms_norm_eps: Number = 0.00000015625
    partial_rotary_factor: Number = 0.5
    attention_bias: bool = True
    eos_token_id: Any = msgspec.field(default_factory=lambda: [151329, 151336, 151338])

    def biases(self) -> Biases:
        """Biases of q, k and v."""
        return Biases(qkv=self.attention_bias)


class Glm4Config(GlmConfig):
    """Schema of GLM-4-0414."""

    architecture = "Glm4ForCausalLM"
    model_types = ("glm4",)
    implementation = "glm4:Glm4ForCausalLM"


class Glm4MoeConfig(FamilyConfig):
    """Schema of GLM-4.5 to 4.7, which have experts."""

    architecture = "Glm4MoeForCausalLM"
    model_types = ("glm4_moe",)
    implementation = "glm4_moe:Glm4MoeForCausalLM"
    harmless = ROUTER_KEYS | words("num_nextn_predict_layers num_mtp_layers")
    skips_next_layers = True

    max_position_embeddings: Count = 131072
    num_key_value_heads: Count | None = 8
    rms_norm_eps: Number = 1e-5
    partial_rotary_factor: Number = 0.5
    attention_bias: bool = False
    use_qk_norm: bool = False
    n_routed_experts: Count = 128
    num_experts_per_tok: Count = 8
    moe_intermediate_size: Count = 1408
    n_shared_experts: Index = 1
    n_group: Index = 1
    topk_group: Index = 1
    first_k_dense_replace: Index = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: Number = 1.0

    def biases(self) -> Biases:
        """Biases of q, k and v."""
        return Biases(qkv=self.attention_bias)

    def moe(self) -> MoeConfig:
        """Experts in all but the first few layers."""
        return grouped_experts(self, frozenset(range(self.first_k_dense_replace)))

    def mtp(self) -> MtpConfig:
        """The MTP head, stored after the last layer."""
        return MtpConfig.after_layers(self.num_hidden_layers, recycles_normed=False)


class Glm4MoeLiteConfig(DeepseekV3Config):
    """GLM-4.7-Flash: DeepSeek V3's layers. transformers lists the layers with experts in
    `mlp_layer_types`."""

    architecture = "Glm4MoeLiteForCausalLM"
    model_types = ("glm4_moe_lite",)

    max_position_embeddings: Count = 202752
    num_key_value_heads: Count | None = 20
    rms_norm_eps: Number = 1e-5
    q_lora_rank: Count | None = 768
    qk_nope_head_dim: Count = 192
    v_head_dim: Count = 256
    n_routed_experts: Count = 64
    num_experts_per_tok: Count = 4
    moe_intermediate_size: Count = 1536
    n_group: Index = 1
    topk_group: Index = 1
    first_k_dense_replace: Index = -1
    """Number of leading dense layers. If it is missing (-1), the dense layers are taken from
    `mlp_layer_types`; if that is missing too, only the first layer is dense."""
    routed_scaling_factor: Number = 1.8

    def moe(self) -> MoeConfig:
        """Experts in all but the first layer, unless config.json lists others."""
        first = self.first_k_dense_replace
        dense = listed_dense_layers(
            self.mlp_layer_types, self.num_hidden_layers, None if first == -1 else first
        )
        return grouped_experts(self, dense)


class GlmMoeDsaConfig(DeepseekV32Config):
    """GLM-5 to 5.2: DeepSeek V3.2's layers, some of which may reuse the selection of the preceding
    layer (arXiv 2603.12201)."""

    architecture = "GlmMoeDsaForCausalLM"
    model_types = ("glm_moe_dsa",)
    harmless = DeepseekV32Config.harmless | words("index_share_for_mtp_iteration")

    max_position_embeddings: Count = 202752
    num_key_value_heads: Count | None = 64
    rms_norm_eps: Number = 1e-5
    q_lora_rank: Count = 2048
    qk_nope_head_dim: Count = 192
    v_head_dim: Count = 256
    n_group: Index = 1
    topk_group: Index = 1
    num_experts: Count | None = None
    """Alternative name of `n_routed_experts`; checkpoints may have both keys."""
    index_n_heads: Count = 32
    indexer_rope_interleave: Annotated[bool, only(True)] = True
    moe_router_dtype: Literal["float32"] = "float32"
    indexer_types: list[str] | None = None
    """Kind of each layer: "full" if it has an indexer, "shared" if it reuses the selection of the
    preceding layer."""
    index_topk_pattern: str | list[str] | None = None
    """Kind of each layer, as in `indexer_types` or as a string of F and S; read if `indexer_types`
    is missing."""
    index_topk_freq: Index = 1
    """Period of "full" layers after the leading ones; read if `indexer_types` and
    `index_topk_pattern` are missing."""
    index_skip_topk_offset: Index = 2
    """Number of leading "full" layers."""

    def derive(self) -> None:
        """Drops an unused `head_dim`, which released checkpoints set to the size of one part of a
        query or of the whole query; raises ValueError if `num_experts` contradicts
        `n_routed_experts`."""
        if self.num_experts not in (None, self.n_routed_experts):
            raise ValueError(
                f"num_experts = {self.num_experts} in config.json must equal n_routed_experts "
                f"({self.n_routed_experts}): remove it"
            )
        sizes = self.qk_rope_head_dim, self.qk_nope_head_dim
        if self.head_dim in (*sizes, sum(sizes)):
            self.head_dim = None

    def indexer_layers(self) -> tuple[bool, ...]:
        """Whether each layer has its own indexer (is "full")."""
        count, key = self.num_hidden_layers, "indexer_types"
        kinds, pattern = self.indexer_types, self.index_topk_pattern
        if kinds is None and pattern is not None:
            key, letters = "index_topk_pattern", {"F": "full", "S": "shared"}
            kinds = (
                [letters.get(kind, kind) for kind in pattern]
                if isinstance(pattern, str)
                else pattern
            )
        if kinds is None:
            key, last = "index_skip_topk_offset", self.index_skip_topk_offset - 1
            full = [max(i - last, 0) % max(self.index_topk_freq, 1) == 0 for i in range(count)]
            kinds = ["full" if one else "shared" for one in full]
        if len(kinds) != count or set(kinds) - {"full", "shared"} or kinds[0] != "full":
            raise ValueError(
                f"{key} = {short(getattr(self, key))} in config.json is not supported: it must "
                f"have full or shared for each of the {count} layers, and full for the first one; "
                "use another checkpoint"
            )
        return tuple(kind == "full" for kind in kinds)


FAMILIES = (GlmConfig, Glm4Config, Glm4MoeConfig, Glm4MoeLiteConfig, GlmMoeDsaConfig)
_VISION_KEYS = words(
    """
    vision_config image_token_id image_start_token_id image_end_token_id video_token_id
    video_start_token_id video_end_token_id
    """
)
_VISION = TensorNames(
    renamed=(("model.language_model.", "model."),), skipped=("visual.", "model.visual.")
)
_DENSE_DEFAULTS = {"max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "head_dim": None}
MULTIMODAL = (
    MultimodalConfig(
        architectures=("Glm4vForConditionalGeneration",),
        model_type="glm4v",
        texts={"glm4v_text": "Glm4ForCausalLM"},
        keys=_VISION_KEYS,
        tensors=_VISION,
        defaults=_DENSE_DEFAULTS,
        text_type="glm4v_text",
    ),
    MultimodalConfig(
        architectures=("Glm46VForConditionalGeneration",),
        model_type="glm46v",
        texts={"glm4v_text": "Glm4ForCausalLM"},
        keys=_VISION_KEYS,
        tensors=_VISION,
        defaults=_DENSE_DEFAULTS,
    ),
    MultimodalConfig(
        architectures=("Glm4vMoeForConditionalGeneration",),
        model_type="glm4v_moe",
        texts={"glm4v_moe_text": "Glm4MoeForCausalLM"},
        keys=_VISION_KEYS,
        tensors=_VISION,
        defaults={"max_position_embeddings": 65536, "attention_bias": True},
    ),
)
