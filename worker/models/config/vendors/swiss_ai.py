"""Schema of Apertus (huggingface.co/swiss-ai). Does not import torch."""

from __future__ import annotations

from typing import Any, Literal

from worker.models.config.family import FamilyConfig, table
from worker.models.config.schema import Count, Number, Yes


class ApertusConfig(FamilyConfig):
    """Apertus: QK norm, and an ungated xIELU MLP."""

    architecture = "ApertusForCausalLM"
    model_types = ("apertus",)
    implementation = "apertus:ApertusForCausalLM"

    max_position_embeddings: Count = 65536
    rms_norm_eps: Number = 1e-5
    eos_token_id: Any = 2
    rope_theta: Number = 12000000.0
    rope_parameters: dict[str, Any] = table(
        rope_type="llama3",
        rope_theta=12000000.0,
        factor=8.0,
        original_max_position_embeddings=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )
    attention_bias: bool = False
    hidden_act: Literal["xielu"] = "xielu"
    qk_norm: Yes = True
    use_qk_norm: Yes = True


FAMILIES = (ApertusConfig,)
