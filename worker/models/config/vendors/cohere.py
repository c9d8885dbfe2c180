"""Command R, R7B and A, and Aya (huggingface.co/CohereLabs). Imports no torch."""

from __future__ import annotations

from typing import Any, Literal

from worker.models.config.family import AlternatingFamilyConfig, FamilyConfig
from worker.models.config.schema import Count, Index, Number, One, Yes


class CohereConfig(FamilyConfig):
    """Command R, without QK norm."""

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


FAMILIES = (CohereConfig, Cohere2Config)
