"""Schema of LongCat-Flash (huggingface.co/meituan-longcat). Does not import torch."""

from __future__ import annotations

from typing import Any, Literal

from worker.models.config.family import Layers
from worker.models.config.latent_family import LatentFamilyConfig
from worker.models.config.moe_config import MoeConfig
from worker.models.config.mtp_config import MtpConfig
from worker.models.config.schema import ROUTER_KEYS, Count, Index, Number, Yes


class LongcatFlashConfig(LatentFamilyConfig):
    """LongCat-Flash: each layer of a checkpoint counts as a pair of layers here, in parallel with
    experts, some of which return their input."""

    architecture = "LongcatFlashForCausalLM"
    model_types = ("longcat_flash",)
    implementation = "longcat:LongcatFlashForCausalLM"
    harmless = ROUTER_KEYS
    skipped = ("model.mtp.",)
    top_k_key = "moe_topk"

    vocab_size: Count = 131072
    hidden_size: Count = 6144
    intermediate_size: Count = 12288
    ffn_hidden_size: Count = 12288
    num_attention_heads: Count = 64
    num_hidden_layers: Layers = 0
    """Number of layers: twice `num_layers`."""
    num_layers: Layers = 28
    max_position_embeddings: Count = 131072
    rms_norm_eps: Number = 1e-5
    rope_theta: Number = 10000000.0
    eos_token_id: Any = 2
    n_routed_experts: Count = 512
    zero_expert_num: Index = 256
    zero_expert_type: Literal["identity"] = "identity"
    moe_topk: Count = 12
    expert_ffn_hidden_size: Count = 2048
    routed_scaling_factor: Number = 6.0
    attention_method: Literal["MLA"] = "MLA"
    mla_scale_kv_lora: Yes = True
    mla_scale_q_lora: Yes = True

    def derive(self) -> None:
        """Sets the number of layers and the size of MLPs."""
        self.num_hidden_layers = self.num_hidden_layers or 2 * self.num_layers
        self.intermediate_size = self.ffn_hidden_size
        if self.num_hidden_layers % 2:
            raise ValueError(
                f"num_hidden_layers {self.num_hidden_layers} in config.json must be even: fix it"
            )

    def moe(self) -> MoeConfig:
        """Experts in parallel with each pair of layers."""
        return MoeConfig(
            num_experts=self.n_routed_experts,
            top_k=self.moe_topk,
            intermediate_size=self.expert_ffn_hidden_size,
            normalize=False,
            has_bias=True,
            scale=self.routed_scaling_factor,
            num_zero_experts=self.zero_expert_num,
        )

    def mtp(self) -> MtpConfig:
        """The MTP head, which has a single layer without experts."""
        layer = "model.mtp.layers.0."
        return MtpConfig(
            layer=layer,
            embedding_norm=f"{layer}enorm.m",
            hidden_norm=f"{layer}hnorm.m",
            projection=f"{layer}eh_proj",
            final_norm="model.mtp.norm",
            zeroes_first=False,
            skipped=("model.mtp.embed_tokens.",),
        )


FAMILIES = (LongcatFlashConfig,)
