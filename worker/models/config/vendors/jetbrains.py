"""Schema of Mellum 2 (huggingface.co/JetBrains). Does not import torch."""

from __future__ import annotations

from typing import Any, Literal

from worker.models.config.family import FULL, SLIDING, WindowedFamilyConfig, table
from worker.models.config.moe_config import MoeConfig, listed_dense_layers
from worker.models.config.schema import ROUTER_KEYS, Count, Index, Yes, words


class MellumConfig(WindowedFamilyConfig):
    """Mellum 2: Qwen3-MoE with sliding windows in the layers that `layer_types` lists, which have a
    separate rotary embedding."""

    architecture = "MellumForCausalLM"
    model_types = ("mellum",)
    implementation = "qwen3_moe:Qwen3MoeForCausalLM"
    harmless = ROUTER_KEYS | words(
        "mtp_layer_types mtp_mlp_layer_types num_mtp_layers num_nextn_predict_layers"
    )
    aliases = (("num_local_experts", "num_experts"),)
    layer_kinds = (SLIDING, FULL)
    window_theta = "rope_theta"
    skipped = ("mtp.",)

    num_key_value_heads: Count | None = 4
    head_dim: Count | None = 128
    max_position_embeddings: Count = 131072
    eos_token_id: Any = None
    rope_parameters: dict[str, Any] = table(
        full_attention={"rope_type": "default", "rope_theta": 500000.0},
        sliding_attention={"rope_type": "default", "rope_theta": 10000.0},
    )
    attention_bias: bool = False
    use_qk_norm: Yes = True
    use_sliding_window: Yes = True
    sliding_window: Index | None = 1024
    num_experts: Count = 64
    num_experts_per_tok: Count = 8
    moe_intermediate_size: Count = 896
    norm_topk_prob: bool = True
    decoder_sparse_step: Literal[1] = 1

    def moe(self) -> MoeConfig:
        """Experts in all layers, unless config.json lists others."""
        return MoeConfig(
            num_experts=self.num_experts,
            top_k=self.num_experts_per_tok,
            intermediate_size=self.moe_intermediate_size,
            dense_layers=listed_dense_layers(
                self.mlp_layer_types, self.num_hidden_layers, None, default=0
            ),
            normalize=self.norm_topk_prob,
        )


FAMILIES = (MellumConfig,)
