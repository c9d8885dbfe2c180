"""Schemas of Hunyuan, Hy3 and Youtu (huggingface.co/tencent). Does not import torch."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from worker.models.config.family import FamilyConfig
from worker.models.config.latent_family import LatentFamilyConfig
from worker.models.config.moe_config import MoeConfig, listed_dense_layers
from worker.models.config.mtp_config import MtpConfig
from worker.models.config.schema import (
    ROUTER_KEYS,
    Count,
    Index,
    Number,
    One,
    RawConfig,
    Yes,
    short,
    words,
)


class HunYuanDenseV1Config(FamilyConfig):
    """Schema of dense Hunyuan."""

    architecture = "HunYuanDenseV1ForCausalLM"
    model_types: ClassVar[tuple[str, ...]] = ("hunyuan_v1_dense",)
    implementation = "hunyuan:HunYuanDenseV1ForCausalLM"
    harmless = words(
        """
        eod_token_id pad_id im_start_id im_end_id im_newline_id mask_init_id text_start_id
        text_end_id org_vocab_size cla_share_factor class_num dense_list pool_type
        """
    )
    """Ids of tokens; parameters of a classification head (`add_classification_head`) and of layers
    that share keys and values (`use_cla`), both of which are not supported."""

    max_position_embeddings: Count = 2048
    rms_norm_eps: Number = 1e-5
    eos_token_id: Any = 2
    attention_bias: bool = False
    use_qk_norm: Yes = True
    attention_head_dim: Count | None = None
    """Size of a head; must match `head_dim` or, if that is missing, the hidden size divided by the
    number of heads."""
    norm_type: Literal["rms"] = "rms"
    use_rotary_pos_emb: Yes = True

    def derive(self) -> None:
        """Replaces `alpha` of dynamic rope scaling with the equivalent, larger base of the rotary
        embedding, which does not depend on the sequence length."""
        if self.attention_head_dim not in (None, self.head_size()):
            raise ValueError(
                f"attention_head_dim {self.attention_head_dim} in config.json must equal head_dim "
                f"or hidden_size / num_attention_heads ({self.head_size()}): fix it"
            )
        key = "rope_scaling" if self.rope_scaling else "rope_parameters"
        table = dict(getattr(self, key) or {})
        alpha, kind = table.pop("alpha", None), table.pop("rope_type", table.pop("type", None))
        if alpha is None:
            return
        dim = self.head_size()
        if type(alpha) not in (int, float) or alpha <= 0 or kind != "dynamic" or dim <= 2:
            raise ValueError(
                f"{key}.alpha {short(alpha)} with rope type {short(kind)} in config.json is not "
                f"supported with head_dim {dim}: alpha must be greater than 0, the type dynamic "
                "and head_dim greater than 2; use another checkpoint"
            )
        for without_effect in ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
            table.pop(without_effect, None)
        theta = float(table.get("rope_theta") or self.rope_theta or 10000.0)
        table.update(rope_type="default", rope_theta=theta * alpha ** (dim / (dim - 2)))
        setattr(self, key, table)


class HunYuanMoEV1Config(HunYuanDenseV1Config):
    """Hunyuan with routed experts and a shared one of the same size in all layers."""

    architecture = "HunYuanMoEV1ForCausalLM"
    model_types = ("hunyuan_v1_moe", "hunyuan")
    implementation = "hunyuan_moe:HunYuanMoEV1ForCausalLM"
    harmless = (
        HunYuanDenseV1Config.harmless
        | ROUTER_KEYS
        | words(
            """
            num_experts_per_tok anyres_pooling_size image_token_id num_media_embeds video_start_id
            video_end_id vit_input_resolution vit_mapping_type vit_norm_type vit_patch vit_token
            """
        )
    )
    """Also parameters of an image encoder, which `vit_type` and `vit_path` would select: both are
    null, since the model reads text only."""
    aliases = (("num_local_experts", "num_experts"),)
    top_k_key = "moe_topk"

    num_experts: Count = 1
    moe_topk: Count = 1
    moe_intermediate_size: Index | None = None
    num_shared_expert: Literal[1] = 1
    norm_topk_prob: Yes = True
    routed_scaling_factor: One = 1
    use_mixed_mlp_moe: Yes = True

    @classmethod
    def prepare(cls, raw: RawConfig) -> RawConfig:
        """config.json in which lists that repeat a value for each layer are replaced by the
        value."""
        changes = {
            key: value[0]
            for key in ("moe_topk", "num_shared_expert", "moe_intermediate_size")
            if type(value := raw.get(key)) is list and value and value == value[:1] * len(value)
        }
        return super().prepare({**raw, **changes})

    def moe(self) -> MoeConfig:
        """Experts in all layers."""
        size = self.intermediate_size
        if self.moe_intermediate_size not in (None, size):
            raise ValueError(
                f"moe_intermediate_size {self.moe_intermediate_size} in config.json is not "
                f"supported: it must equal intermediate_size ({size})"
            )
        return MoeConfig(
            num_experts=self.num_experts,
            top_k=self.moe_topk,
            intermediate_size=size,
            shared_size=size,
        )


class HYV3Config(FamilyConfig):
    """Hy3: experts in all but the first layer, with DeepSeek V3's router without groups."""

    architecture = "HYV3ForCausalLM"
    model_types = ("hy_v3",)
    implementation = "hy3:HYV3ForCausalLM"
    harmless = ROUTER_KEYS | words(
        """
        eod_token_id enable_attention_fp32_softmax enable_lm_head_fp32 enable_moe_fp32_combine
        num_nextn_predict_layers use_grouped_mm
        """
    )
    """Keys for the precision and kernels used in training, and for multi-token prediction
    layers."""
    aliases = (("num_local_experts", "num_experts"),)
    skips_next_layers = True

    max_position_embeddings: Count = 131072
    num_key_value_heads: Count | None = 8
    head_dim: Count | None = 128
    rms_norm_eps: Number = 1e-5
    rope_theta: Number = 11158840.0
    attention_bias: bool = False
    qk_norm: Yes = True
    use_qk_norm: Yes = True
    num_experts: Count = 192
    num_experts_per_tok: Count = 8
    moe_intermediate_size: Count = 1536
    expert_hidden_dim: Count | None = None
    """Alternative name of `moe_intermediate_size`; checkpoints may have both keys."""
    num_shared_experts: Index = 1
    first_k_dense_replace: Index | None = None
    moe_router_enable_expert_bias: Yes = True
    moe_router_use_sigmoid: Yes = True
    route_norm: Yes = True
    router_scaling_factor: Number = 2.826

    def mtp(self) -> MtpConfig:
        """The MTP head, stored after the last layer."""
        return MtpConfig.after_layers(self.num_hidden_layers, final_norm="final_layernorm")

    def moe(self) -> MoeConfig:
        """Experts in all but the first layer, unless config.json lists others."""
        if self.expert_hidden_dim not in (None, self.moe_intermediate_size):
            raise ValueError(
                f"expert_hidden_dim {self.expert_hidden_dim} and moe_intermediate_size "
                f"{self.moe_intermediate_size} in config.json disagree: make them consistent"
            )
        return MoeConfig(
            num_experts=self.num_experts,
            top_k=self.num_experts_per_tok,
            intermediate_size=self.moe_intermediate_size,
            dense_layers=listed_dense_layers(
                self.mlp_layer_types, self.num_hidden_layers, self.first_k_dense_replace
            ),
            sigmoid=True,
            has_bias=True,
            scale=self.router_scaling_factor,
            shared_size=self.moe_intermediate_size * self.num_shared_experts,
        )


class YoutuConfig(LatentFamilyConfig):
    """Youtu-LLM: DeepSeek V3's attention with an MLP in all layers."""

    architecture = "YoutuForCausalLM"
    model_types = ("youtu", "youtu_llm")
    implementation = "youtu:YoutuForCausalLM"
    harmless = words("embedding_initializer_range")

    num_key_value_heads: Count | None = 16
    max_position_embeddings: Count = 131072
    eos_token_id: Any = 128001
    tie_word_embeddings: bool = True


FAMILIES = (HunYuanDenseV1Config, HunYuanMoEV1Config, HYV3Config, YoutuConfig)
