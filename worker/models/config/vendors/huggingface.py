"""Schemas of SmolLM3, SmolVLM and Idefics3 (huggingface.co/HuggingFaceTB). Does not import
torch."""

from __future__ import annotations

from typing import Any

from worker.models.config.family import FamilyConfig, rotating_layers
from worker.models.config.multimodal import MultimodalConfig, TensorNames
from worker.models.config.schema import Count, Number, words


class SmolLM3Config(FamilyConfig):
    """SmolLM3: Llama in which some layers have no rotary embedding (NoPE)."""

    architecture = "SmolLM3ForCausalLM"
    model_types = ("smollm3",)
    implementation = "smollm3:SmolLM3ForCausalLM"
    harmless = frozenset({"sliding_window"})

    max_position_embeddings: Count = 32768
    num_key_value_heads: Count | None = 4
    eos_token_id: Any = 128001
    tie_word_embeddings: bool = True
    rope_theta: Number = 2000000.0
    attention_bias: bool = False
    mlp_bias: bool = False
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: Count = 4

    def rotating(self) -> tuple[bool, ...]:
        """Whether each layer has rotary embedding."""
        return rotating_layers(
            self.no_rope_layers, self.no_rope_layer_interval, self.num_hidden_layers
        )


FAMILIES = (SmolLM3Config,)
_TEXTS = {"llama": "LlamaForCausalLM"}
_KEYS = words(
    """
    vision_config image_token_id scale_factor pixel_shuffle_factor perceiver_config
    """
)
_TENSORS = TensorNames(
    renamed=(("model.text_model.", "model."),), skipped=("model.vision_model.", "model.connector.")
)
_DEFAULTS = {"rms_norm_eps": 1e-5}
MULTIMODAL = (
    MultimodalConfig(
        architectures=("Idefics3ForConditionalGeneration",),
        model_type="idefics3",
        texts=_TEXTS,
        keys=_KEYS,
        tensors=_TENSORS,
        defaults=_DEFAULTS,
    ),
    MultimodalConfig(
        architectures=("SmolVLMForConditionalGeneration",),
        model_type="smolvlm",
        texts=_TEXTS,
        keys=_KEYS,
        tensors=_TENSORS,
        defaults=_DEFAULTS,
    ),
)
