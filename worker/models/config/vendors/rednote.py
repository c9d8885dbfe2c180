"""Schema of dots.llm1 (huggingface.co/rednote-hilab). Does not import torch."""

from __future__ import annotations

from typing import Any, Literal

from worker.models.config.family import FULL, SLIDING, WindowedFamilyConfig
from worker.models.config.moe_config import MoeConfig, grouped_experts
from worker.models.config.schema import ROUTER_KEYS, Count, Index, Number, Yes


class Dots1Config(WindowedFamilyConfig, kw_only=True):
    """dots.llm1: Qwen3's attention, and DeepSeek V3's experts in all but the first few layers."""

    architecture = "Dots1ForCausalLM"
    model_types = ("dots1",)
    implementation = "glm4_moe:Glm4MoeForCausalLM"
    harmless = ROUTER_KEYS
    aliases = (("num_local_experts", "n_routed_experts"),)
    layer_kinds = (FULL, SLIDING)

    max_position_embeddings: Count = 2048
    num_key_value_heads: Count | None = 32
    eos_token_id: Any = None
    attention_bias: bool = False
    use_qk_norm: Yes = True
    sliding_window: Index | None = 4096
    max_window_layers: Index = 62
    """The first layer with a sliding window, unless `layer_types` is set."""
    n_routed_experts: Count
    num_experts_per_tok: Count
    moe_intermediate_size: Count = 1408
    n_shared_experts: Index = 0
    n_group: Count = 1
    topk_group: Count = 1
    first_k_dense_replace: Index = 0
    norm_topk_prob: bool = False
    routed_scaling_factor: Number = 1.0
    moe_layer_freq: Literal[1] = 1
    scoring_func: Literal["noaux_tc", "sigmoid"] = "sigmoid"
    """Scoring function of the router; both names refer to the sigmoid."""

    def layer_kind(self, index: int) -> str:
        """Sliding windows, starting with layer `max_window_layers`."""
        return FULL if index < self.max_window_layers else SLIDING

    def moe(self) -> MoeConfig:
        """Experts in all but the first few layers."""
        return grouped_experts(self, frozenset(range(self.first_k_dense_replace)))


FAMILIES = (Dots1Config,)
