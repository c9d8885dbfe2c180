"""Arcee's AFM (huggingface.co/arcee-ai). Imports no torch."""

from __future__ import annotations

from typing import Any, Literal

from worker.models.config.family import FamilyConfig
from worker.models.config.schema import Count, Number


class ArceeConfig(FamilyConfig):
    """AFM: Llama whose MLP has no gate."""

    architecture = "ArceeForCausalLM"
    model_types = ("arcee",)
    implementation = "arcee:ArceeForCausalLM"

    max_position_embeddings: Count = 4096
    rms_norm_eps: Number = 1e-5
    eos_token_id: Any = 128001
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: Literal["relu2"] = "relu2"


FAMILIES = (ArceeConfig,)
