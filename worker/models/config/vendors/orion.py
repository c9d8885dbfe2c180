"""Schema of Orion (huggingface.co/OrionStarAI). Does not import torch."""

from __future__ import annotations

from typing import Any

from worker.models.config.family import FamilyConfig
from worker.models.config.schema import Count, Number


class OrionConfig(FamilyConfig):
    """Orion: Llama with LayerNorm."""

    architecture = "OrionForCausalLM"
    model_types = ("orion",)
    implementation = "stablelm:StableLmForCausalLM"

    max_position_embeddings: Count = 4096
    rms_norm_eps: Number = 1e-5
    eos_token_id: Any = 2


FAMILIES = (OrionConfig,)
