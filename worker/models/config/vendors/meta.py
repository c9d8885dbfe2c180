"""Schemas of Llama (huggingface.co/meta-llama), Code World Model (huggingface.co/facebook), and
LLaVA (huggingface.co/llava-hf), which was first based on Llama. Does not import torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from worker.models.config.family import (
    CHUNKED,
    FULL,
    SLIDING,
    FamilyConfig,
    WindowedFamilyConfig,
    rotating_layers,
    table,
)
from worker.models.config.moe_config import MoeConfig
from worker.models.config.multimodal import VISION_AND_PROJECTOR, MultimodalConfig, TensorNames
from worker.models.config.schema import ROUTER_KEYS, Count, Index, Number, short, words


class LlamaConfig(FamilyConfig):
    """Llama 1 to 3, and the many families released as Llama."""

    architecture = "LlamaForCausalLM"
    other_architectures = ("LLaMAForCausalLM", "AquilaForCausalLM", "XverseForCausalLM")
    model_types = ("llama", "aquila", "xverse")
    implementation = "llama:LlamaForCausalLM"
    harmless = words("sliding_window max_tokenizer_truncation")

    max_position_embeddings: Count = 2048
    eos_token_id: Any = 2
    attention_bias: bool = False
    mlp_bias: bool = False


class CwmConfig(WindowedFamilyConfig):
    """Code World Model: Llama with sliding windows in all but every fourth layer."""

    architecture = "CwmForCausalLM"
    model_types = ("cwm",)
    implementation = "llama:LlamaForCausalLM"
    layer_kinds = (FULL, SLIDING)

    num_key_value_heads: Count | None = 8
    head_dim: Count | None = 128
    max_position_embeddings: Count = 131072
    rms_norm_eps: Number = 1e-5
    eos_token_id: Any = msgspec.field(default_factory=lambda: [128001, 128008, 128009])
    rope_parameters: dict[str, Any] | None = table(
        rope_type="llama3",
        rope_theta=1000000.0,
        factor=16.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    sliding_window: Index | None = 8192

    def layer_kind(self, index: int) -> str:
        """Full attention in the first of every four layers."""
        return SLIDING if index % 4 else FULL


class Llama4Config(FamilyConfig):
    """The language model of Llama 4: chunked attention, and experts in some layers."""

    architecture = "Llama4ForCausalLM"
    model_types = ("llama4_text",)
    implementation = "llama4:Llama4ForCausalLM"
    harmless = ROUTER_KEYS | words("router_jitter_noise for_llm_compressor")
    """Keys without effect. LLM Compressor sets `for_llm_compressor` in checkpoints that have a
    tensor for each expert."""
    layer_kinds = (FULL, CHUNKED)
    has_chunks = True
    extra_keys = (
        *("intermediate_size_mlp", "use_qk_norm"),
        *("attn_temperature_tuning", "floor_scale", "attn_scale"),
    )

    vocab_size: Count = 202048
    hidden_size: Count = 5120
    intermediate_size: Count = 8192
    intermediate_size_mlp: Count = 16384
    num_attention_heads: Count = 40
    num_key_value_heads: Count | None = 8
    head_dim: Count | None = 128
    max_position_embeddings: Count = 131072
    rms_norm_eps: Number = 1e-5
    rope_theta: Number = 500000.0
    eos_token_id: Any = 2
    attention_bias: bool = False
    use_qk_norm: bool = True
    """Whether heads of q and k are normalized without weights."""
    num_local_experts: Count = 16
    num_experts_per_tok: Count = 1
    moe_layers: list[int] | None = None
    interleave_moe_layer_step: Count = 1
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: Count = 4
    attention_chunk_size: Count | None = 8192
    attn_temperature_tuning: bool = True
    floor_scale: Count = 8192
    attn_scale: Number = 0.1

    def has_qk_norm(self) -> bool:
        """Always False, since heads are normalized without weights."""
        return False

    def layer_kind(self, index: int) -> str:
        """Chunked attention in layers with rotary embedding."""
        return CHUNKED if self.rotating()[index] else FULL

    def window(self) -> int | None:
        """Length of a chunk in tokens."""
        if self.attention_chunk_size is None and CHUNKED in self.kinds_of_layers():
            raise ValueError(
                "attention_chunk_size = null in config.json must be a positive integer: fix it"
            )
        return self.attention_chunk_size

    def rotating(self) -> tuple[bool, ...]:
        """Whether each layer has rotary embedding."""
        return rotating_layers(
            self.no_rope_layers, self.no_rope_layer_interval, self.num_hidden_layers
        )

    def moe(self) -> MoeConfig:
        """Routed experts and a shared one of the same size, in the layers that `moe_layers` lists,
        or in every n-th, where n is `interleave_moe_layer_step`."""
        layers, sparse = range(self.num_hidden_layers), self.moe_layers
        if sparse is None:
            step = self.interleave_moe_layer_step
            sparse = list(layers[step - 1 :: step])
        elif not set(sparse) <= set(layers):
            raise ValueError(
                f"moe_layers = {short(sparse)} in config.json must be a list of layer indices in "
                f"[0, {len(layers) - 1}]: fix it"
            )
        return MoeConfig(
            num_experts=self.num_local_experts,
            top_k=self.num_experts_per_tok,
            intermediate_size=self.intermediate_size,
            dense_layers=frozenset(layers) - frozenset(sparse),
            normalize=False,
            sigmoid=True,
            shared_size=self.intermediate_size,
        )


FAMILIES = (LlamaConfig, CwmConfig, Llama4Config)
_LLAVA_TEXTS = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
}
_LLAVA_KEYS = words(
    """
    vision_config ignore_index image_token_index image_token_id image_seq_length
    multimodal_projector_bias projector_hidden_act vision_feature_layer
    vision_feature_select_strategy image_grid_pinpoints video_token_index video_token_id
    vision_aspect_ratio use_image_newline_parameter
    """
)
_LLAVA_NEXT = replace(
    VISION_AND_PROJECTOR,
    skipped=(*VISION_AND_PROJECTOR.skipped, "image_newline", "model.image_newline"),
)
MULTIMODAL = (
    MultimodalConfig(
        architectures=("Llama4ForConditionalGeneration",),
        model_type="llama4",
        texts={"llama4_text": "Llama4ForCausalLM"},
        keys=words(
            """
            vision_config image_token_index image_token_id boi_token_index boi_token_id
            eoi_token_index eoi_token_id
            """
        ),
        tensors=TensorNames(
            renamed=(("language_model.", ""),), skipped=("vision_model.", "multi_modal_projector.")
        ),
    ),
    MultimodalConfig(
        architectures=("LlavaForConditionalGeneration",),
        model_type="llava",
        texts=_LLAVA_TEXTS,
        keys=_LLAVA_KEYS,
        tensors=VISION_AND_PROJECTOR,
    ),
    MultimodalConfig(
        architectures=("LlavaNextForConditionalGeneration",),
        model_type="llava_next",
        texts=_LLAVA_TEXTS,
        keys=_LLAVA_KEYS,
        tensors=_LLAVA_NEXT,
    ),
    MultimodalConfig(
        architectures=("LlavaOnevisionForConditionalGeneration",),
        model_type="llava_onevision",
        texts=_LLAVA_TEXTS,
        keys=_LLAVA_KEYS,
        tensors=_LLAVA_NEXT,
    ),
)
