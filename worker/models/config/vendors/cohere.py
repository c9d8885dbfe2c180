"""Schemas of Command R, R7B and A, and Aya (huggingface.co/CohereLabs). Does not import torch."""

from __future__ import annotations

from typing import Any, Literal

from worker.models.config.family import (
    FULL,
    SLIDING,
    AlternatingFamilyConfig,
    FamilyConfig,
    period_of,
)
from worker.models.config.moe_config import MoeConfig, listed_dense_layers
from worker.models.config.schema import ROUTER_KEYS, Count, Index, Number, One, Yes


class CohereConfig(FamilyConfig):
    """Schema of Command R, without QK norm."""

    architecture = "CohereForCausalLM"
    model_types = ("cohere",)
    implementation = "cohere:CohereForCausalLM"
    harmless = frozenset({"model_max_length"})
    extra_keys = ("logit_scale",)

    max_position_embeddings: Count = 8192
    layer_norm_eps: Number = 1e-5
    logit_scale: Number = 0.0625
    tie_word_embeddings: bool = True
    rope_theta: Number = 500000.0
    eos_token_id: Any = 255001
    attention_bias: bool = False

    def derive(self) -> None:
        """Sets the epsilon of norms."""
        self.rms_norm_eps = self.layer_norm_eps


class Cohere2Config(AlternatingFamilyConfig):
    """Command R7B and A: sliding windows in all but every fourth layer."""

    architecture = "Cohere2ForCausalLM"
    model_types = ("cohere2",)
    implementation = "cohere:Cohere2ForCausalLM"
    harmless = frozenset({"use_parallel_embedding"})
    extra_keys = ("logit_scale",)

    max_position_embeddings: Count = 8192
    layer_norm_eps: Number = 1e-5
    logit_scale: Number = 0.0625
    tie_word_embeddings: bool = True
    eos_token_id: Any = 255001
    attention_bias: bool = False
    rope_theta: Number = 10000.0
    sliding_window: Index | None = 4096
    sliding_window_pattern: Index | str = 4
    layer_switch: Literal[4] = 4
    order_of_interleaved_layers: Literal["local_attn_first"] = "local_attn_first"
    position_embedding_type: Literal["rope_gptj"] = "rope_gptj"
    rotary_pct: One = 1.0
    use_embedding_sharing: Yes = True
    use_gated_activation: Yes = True
    use_parallel_block: Yes = True

    def derive(self) -> None:
        """Sets the epsilon of norms."""
        self.rms_norm_eps = self.layer_norm_eps


class Cohere2MoeConfig(Cohere2Config):
    """Command A+ and North Mini: Command A with experts in all but the first few layers, and
    optionally RMSNorm."""

    architecture = "Cohere2MoeForCausalLM"
    model_types = ("cohere2_moe",)
    implementation = "cohere:Cohere2MoeForCausalLM"
    harmless = Cohere2Config.harmless | ROUTER_KEYS

    head_dim: Count | None = 128
    rms_norm_eps: Number = 0.0
    """Epsilon of RMSNorm; 0 or null if the norms are LayerNorm."""
    num_experts: Count = 8
    num_experts_per_tok: Count = 2
    num_shared_experts: Index = 0
    shared_expert_combination_strategy: Literal["average", "sum"] = "average"
    expert_selection_fn: Literal["softmax", "sigmoid"] = "softmax"
    norm_topk_prob: bool = True
    first_k_dense_replace: Index | None = None
    prefix_dense_intermediate_size: Count | None = None
    prefix_dense_sliding_window_pattern: Count = 1

    def derive(self) -> None:
        """Sets the epsilon of norms, and sets `layer_norm_eps` to 0 if the norms are RMSNorm."""
        if self.rms_norm_eps:
            self.layer_norm_eps = 0.0
        else:
            self.rms_norm_eps = self.layer_norm_eps

    def extra(self) -> dict[str, Any]:
        """Scale of logits, kind of norms, size of the first layers' MLPs, and how a shared expert
        is added."""
        return {
            "logit_scale": self.logit_scale,
            "has_rms_norm": self.layer_norm_eps == 0,
            "dense_size": self.prefix_dense_intermediate_size or self.intermediate_size,
            "averages": self.num_shared_experts > 0
            and self.shared_expert_combination_strategy == "average",
        }

    def layer_kind(self, index: int) -> str:
        """Full attention in every n-th layer, counted from the first layer with experts; the dense
        layers before it have a separate period."""
        first = self.first_k_dense_replace or 0
        if index < first:
            return SLIDING if (index + 1) % self.prefix_dense_sliding_window_pattern else FULL
        period = period_of("sliding_window_pattern", self.sliding_window_pattern)
        return SLIDING if (index - first + 1) % period else FULL

    def rotating(self) -> tuple[bool, ...]:
        """Whether each layer has rotary embedding: layers with windows do, and so do the dense
        layers if all of these have full attention."""
        always = self._dense_layers() if self.prefix_dense_sliding_window_pattern == 1 else ()
        kinds = enumerate(self.kinds_of_layers())
        return tuple(kind == SLIDING or layer in always for layer, kind in kinds)

    def moe(self) -> MoeConfig:
        """Experts of size `intermediate_size`, scored by softmax or by sigmoids."""
        is_sigmoid = self.expert_selection_fn == "sigmoid"
        return MoeConfig(
            num_experts=self.num_experts,
            top_k=self.num_experts_per_tok,
            intermediate_size=self.intermediate_size,
            dense_layers=self._dense_layers(),
            normalize=self.norm_topk_prob or not is_sigmoid,
            sigmoid=is_sigmoid,
            shared_size=self.intermediate_size * self.num_shared_experts,
        )

    def _dense_layers(self) -> frozenset[int]:
        first = self.first_k_dense_replace
        return listed_dense_layers(self.mlp_layer_types, self.num_hidden_layers, first, default=0)


FAMILIES = (CohereConfig, Cohere2Config, Cohere2MoeConfig)
