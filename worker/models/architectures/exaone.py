"""EXAONE 3 and 3.5 (huggingface.co/LGAI-EXAONE): Llama with a different checkpoint layout.

Schema: `config/vendors/lg.py`.
"""

from __future__ import annotations

from typing import ClassVar

from worker.models.architectures.decoder import DecoderModel
from worker.models.architectures.llama import LlamaLayer
from worker.models.layers.attention import AttentionNames, AttentionTraits, GatedMLP


class ExaoneLayer(LlamaLayer):
    """Llama layer with EXAONE 3's checkpoint names for the norms."""

    norm_names: ClassVar[tuple[str, ...]] = ("ln_1", "ln_2")


class ExaoneForCausalLM(DecoderModel):
    """EXAONE 3 and 3.5: Llama with different checkpoint names."""

    embedding_name: ClassVar[str] = "transformer.wte"
    layers_name: ClassVar[str] = "transformer.h"
    norm_name: ClassVar[str] = "transformer.ln_f"

    def build_layer(self, index: int) -> ExaoneLayer:
        """Builds a layer; all layers have the same structure. The gate is named c_fc_0 in
        checkpoints."""
        return ExaoneLayer(
            *(self, index, GatedMLP(self.config, self.options, names=_MLP_NAMES)),
            traits=AttentionTraits(names=AttentionNames(output="out_proj")),
            attention_name="attn.attention",
        )


_MLP_NAMES = ("c_fc_0", "c_fc_1", "c_proj")
