"""Schema of Jais 2 (huggingface.co/inceptionai). Does not import torch."""

from __future__ import annotations

from typing import Any, Literal

from worker.models.config.family import FamilyConfig
from worker.models.config.schema import Count, Number


class Jais2Config(FamilyConfig):
    """Jais 2: LayerNorm and an ungated MLP."""

    architecture = "Jais2ForCausalLM"
    model_types = ("jais2",)
    implementation = "nemotron:Jais2ForCausalLM"

    max_position_embeddings: Count = 8192
    layer_norm_eps: Number = 1e-5
    eos_token_id: Any = 150024
    attention_bias: bool = True
    mlp_bias: bool = True
    hidden_act: Literal["relu2"] = "relu2"

    def derive(self) -> None:
        """Sets the epsilon of norms."""
        self.rms_norm_eps = self.layer_norm_eps


FAMILIES = (Jais2Config,)
