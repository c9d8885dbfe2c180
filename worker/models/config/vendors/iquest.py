"""Schema of IQuest-Coder (huggingface.co/IQuestLab). Does not import torch."""

from __future__ import annotations

from typing import Any

from worker.models.config.family import FamilyConfig
from worker.models.config.schema import Count, Number


class IQuestCoderConfig(FamilyConfig):
    """IQuest-Coder, which has Llama's layers."""

    architecture = "IQuestCoderForCausalLM"
    model_types = ("iquestcoder",)
    implementation = "llama:LlamaForCausalLM"
    harmless = frozenset({"sliding_window"})

    max_position_embeddings: Count = 131072
    num_key_value_heads: Count | None = 8
    head_dim: Count | None = 128
    rms_norm_eps: Number = 1e-5
    eos_token_id: Any = 2
    attention_bias: bool = False
    mlp_bias: bool = False


FAMILIES = (IQuestCoderConfig,)
