"""Schema of Baichuan 2 (huggingface.co/baichuan-inc). Does not import torch."""

from __future__ import annotations

from typing import Any

from worker.models.config.family import FamilyConfig
from worker.models.config.schema import words


class BaichuanConfig(FamilyConfig):
    """Baichuan 2 7B. The 13B model has the same architecture in config.json, but uses ALiBi instead
    of rotary embedding; only the hidden size distinguishes the two."""

    architecture = "BaichuanForCausalLM"
    model_types = ("baichuan",)
    implementation = "baichuan:BaichuanForCausalLM"
    harmless = words("model_max_length z_loss_weight")

    eos_token_id: Any = 2

    def derive(self) -> None:
        """Raises ValueError for the 13B model, and for tied embeddings."""
        if self.hidden_size == 5120:
            raise ValueError(
                "hidden_size = 5120 in config.json is not supported: this is Baichuan 13B, which "
                "uses ALiBi instead of rotary embedding; use Baichuan2-7B"
            )
        if self.tie_word_embeddings:
            raise ValueError(
                "tie_word_embeddings = true in config.json is not supported: it must be false, "
                "since the rows of the LM head's weight are normalized"
            )


FAMILIES = (BaichuanConfig,)
