"""MiMo (huggingface.co/XiaomiMiMo). Imports no torch."""

from __future__ import annotations

from worker.models.config.family import Biases
from worker.models.config.schema import Count
from worker.models.config.vendors.qwen import QwenWindowsConfig


class MiMoConfig(QwenWindowsConfig):
    """MiMo: Qwen2's layers. Layers for multi-token prediction are skipped."""

    architecture = "MiMoForCausalLM"
    model_types = ("mimo",)
    implementation = "llama:LlamaForCausalLM"
    harmless = frozenset({"num_nextn_predict_layers"})
    skipped = ("model.mtp_layers.",)

    max_position_embeddings: Count = 32768
    attention_bias: bool = True

    def biases(self) -> Biases:
        """Biases of q, k and v."""
        return Biases(qkv=self.attention_bias)


FAMILIES = (MiMoConfig,)
