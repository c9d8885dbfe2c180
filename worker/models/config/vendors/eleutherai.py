"""Schema of GPT-NeoX and Pythia (huggingface.co/EleutherAI). Does not import torch."""

from __future__ import annotations

from typing import Any, Literal

from worker.models.config.family import Biases, FamilyConfig
from worker.models.config.schema import Count, Number, words


class GPTNeoXConfig(FamilyConfig):
    """GPT-NeoX and Pythia: LayerNorm; attention and an ungated MLP, which are parallel unless
    `use_parallel_residual` is false."""

    architecture = "GPTNeoXForCausalLM"
    model_types = ("gpt_neox",)
    implementation = "gpt_neox:GPTNeoXForCausalLM"
    harmless = words("classifier_dropout is_decoder")
    aliases = (("rotary_pct", "partial_rotary_factor"), ("rotary_emb_base", "rope_theta"))
    extra_keys = ("hidden_act", "use_parallel_residual")
    skipped_ends = (".attention.bias", ".attention.masked_bias")
    """Name suffixes of causal masks, which the first releases contain."""

    max_position_embeddings: Count = 2048
    layer_norm_eps: Number = 1e-5
    partial_rotary_factor: Number = 0.25
    eos_token_id: Any = 2
    attention_bias: bool = True
    hidden_act: Literal["gelu", "gelu_fast", "gelu_new", "gelu_pytorch_tanh"] = "gelu"
    """GELU: exact, or with the tanh approximation, which has three names."""
    use_parallel_residual: bool = True

    def derive(self) -> None:
        """Sets the epsilon of norms."""
        self.rms_norm_eps = self.layer_norm_eps

    def biases(self) -> Biases:
        """Biases of the MLP and, if `attention_bias` is set, of attention."""
        return Biases(self.attention_bias, self.attention_bias, True)


FAMILIES = (GPTNeoXConfig,)
