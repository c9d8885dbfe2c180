"""Nemotron 4 and Minitron (huggingface.co/nvidia). Imports no torch."""

from __future__ import annotations

from typing import Any, Literal

from worker.models.config.family import FamilyConfig
from worker.models.config.schema import Count, Number


class NemotronConfig(FamilyConfig):
    """Nemotron 4: LayerNorm, and an MLP without a gate."""

    architecture = "NemotronForCausalLM"
    model_types = ("nemotron",)
    implementation = "nemotron:NemotronForCausalLM"

    max_position_embeddings: Count = 4096
    norm_eps: Number = 1e-5
    partial_rotary_factor: Number = 0.5
    eos_token_id: Any = 3
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: Literal["relu2"] = "relu2"

    def derive(self) -> None:
        """Sets the epsilon of norms."""
        self.rms_norm_eps = self.norm_eps


FAMILIES = (NemotronConfig,)
