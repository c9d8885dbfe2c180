"""EXAONE 4 (huggingface.co/LGAI-EXAONE). Imports no torch."""

from __future__ import annotations

from typing import Any

from worker.models.config.family import AlternatingFamilyConfig
from worker.models.config.schema import Count, Index, Number, Yes


class Exaone4Config(AlternatingFamilyConfig):
    """EXAONE 4: sliding windows in all but every fourth layer; the others have no rotary
    embedding."""

    architecture = "Exaone4ForCausalLM"
    model_types = ("exaone4",)
    implementation = "exaone4:Exaone4ForCausalLM"
    extra_keys = ("sliding_window",)

    max_position_embeddings: Count = 2048
    num_key_value_heads: Count | None = 32
    rms_norm_eps: Number = 1e-5
    use_qk_norm: Yes = True
    sliding_window: Index | None = 4096
    sliding_window_pattern: Index | str = 4
    eos_token_id: Any = 2


FAMILIES = (Exaone4Config,)
