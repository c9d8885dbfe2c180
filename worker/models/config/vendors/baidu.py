"""Schemas of ERNIE 4.5 (huggingface.co/baidu). Does not import torch."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from worker.models.config.family import FamilyConfig
from worker.models.config.moe_config import MoeConfig
from worker.models.config.mtp_config import MtpConfig
from worker.models.config.schema import ROUTER_KEYS, Count, Index, Number, only, words


class Ernie45Config(FamilyConfig):
    """Schema of dense ERNIE 4.5."""

    architecture = "Ernie4_5ForCausalLM"
    model_types = ("ernie4_5",)
    implementation = "ernie4_5:Ernie45ForCausalLM"

    max_position_embeddings: Count = 131072
    num_key_value_heads: Count | None = 2
    head_dim: Count | None = 128
    rms_norm_eps: Number = 1e-5
    tie_word_embeddings: bool = True
    rope_theta: Number = 500000.0
    eos_token_id: Any = 2


class Ernie45MoeConfig(FamilyConfig):
    """ERNIE 4.5 with routed and shared experts in every n-th layer of a range."""

    architecture = "Ernie4_5_MoeForCausalLM"
    model_types = ("ernie4_5_moe",)
    implementation = "ernie4_5:Ernie45MoeForCausalLM"
    harmless = ROUTER_KEYS | words("num_nextn_predict_layers")
    skipped = ("model.mtp_",)
    top_k_key = "moe_k"

    max_position_embeddings: Count = 131072
    num_key_value_heads: Count | None = 4
    rms_norm_eps: Number = 1e-5
    tie_word_embeddings: bool = True
    rope_theta: Number = 500000.0
    eos_token_id: Any = 2
    moe_intermediate_size: Count = 1536
    moe_k: Count = 6
    moe_num_experts: Count = 64
    moe_num_shared_experts: Index = 2
    moe_layer_start_index: Index = 1
    moe_layer_end_index: Annotated[int, Meta(ge=-1)] = -1
    """Last layer with experts; -1 for the model's last layer."""
    moe_layer_interval: Count = 1
    moe_norm_min: Annotated[float, only(1e-12)] = 1e-12

    def moe(self) -> MoeConfig:
        """Experts; a bias is added to the scores only for the selection."""
        count, last = self.num_hidden_layers, self.moe_layer_end_index
        sparse = {
            layer
            for layer in range(count)
            if self.moe_layer_start_index <= layer <= (count if last == -1 else last)
            and not (layer + 1) % self.moe_layer_interval
        }
        return MoeConfig(
            num_experts=self.moe_num_experts,
            top_k=self.moe_k,
            intermediate_size=self.moe_intermediate_size,
            dense_layers=frozenset(range(count)) - sparse,
            has_bias=True,
            shared_size=self.moe_intermediate_size * self.moe_num_shared_experts,
        )

    def mtp(self) -> MtpConfig:
        """The MTP head. Its layer is dense, and the norm before the LM head is the model's
        (FastDeploy, `ernie4_5_mtp.py`)."""
        return MtpConfig(
            layer="model.mtp_block.0.",
            embedding_norm="model.mtp_emb_norm.0",
            hidden_norm="model.mtp_hidden_norm.0",
            projection="model.mtp_linear_proj.0",
            final_norm="model.norm",
            is_dense=True,
        )


FAMILIES = (Ernie45Config, Ernie45MoeConfig)
