"""Schema of HyperCLOVA X (huggingface.co/naver-hyperclovax). Does not import torch."""

from __future__ import annotations

from typing import Any, ClassVar

from worker.models.config.family import FamilyConfig
from worker.models.config.schema import Count, Number


class HyperCLOVAXConfig(FamilyConfig):
    """HyperCLOVA X SEED Think: Granite with norms before and after the blocks; logits are
    multiplied by `logits_scaling`."""

    architecture = "HyperCLOVAXForCausalLM"
    model_types = ("hyperclovax",)
    implementation = "hyperclovax:HyperCLOVAXForCausalLM"
    extra_keys: ClassVar[tuple[str, ...]] = (
        *("embedding_multiplier", "attention_multiplier", "residual_multiplier"),
        *("logits_scaling", "use_post_norm"),
    )

    max_position_embeddings: Count = 2048
    eos_token_id: Any = 2
    attention_bias: bool = False
    mlp_bias: bool = False
    embedding_multiplier: Number = 1.0
    attention_multiplier: Number | None = None
    residual_multiplier: Number = 1.0
    logits_scaling: Number = 1.0
    use_post_norm: bool = True
    """Whether the outputs of attention and MLP are normalized before they are added."""

    def derive(self) -> None:
        """Sets the factor applied to attention scores to the default if it is missing."""
        if self.attention_multiplier is None:
            self.attention_multiplier = self.head_size() ** -0.5


FAMILIES = (HyperCLOVAXConfig,)
