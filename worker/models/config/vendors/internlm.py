"""Schemas of InternLM (huggingface.co/internlm) and InternVL (huggingface.co/OpenGVLab). Does not
import torch."""

from __future__ import annotations

from typing import Any

from worker.models.config.family import Biases, FamilyConfig
from worker.models.config.multimodal import VISION_AND_PROJECTOR, MultimodalConfig
from worker.models.config.schema import Count, words


class InternLMConfig(FamilyConfig):
    """InternLM 1: Llama with biases in attention."""

    architecture = "InternLMForCausalLM"
    model_types = ("internlm",)
    implementation = "llama:LlamaForCausalLM"

    max_position_embeddings: Count = 2048
    bias: bool = True
    eos_token_id: Any = 2

    def biases(self) -> Biases:
        """Biases of all projections of attention."""
        return Biases(qkv=self.bias, output=self.bias)


class InternLM2Config(InternLMConfig):
    """Schema of InternLM 2 and 2.5."""

    architecture = "InternLM2ForCausalLM"
    model_types = ("internlm2",)
    implementation = "internlm2:InternLM2ForCausalLM"


class InternLM3Config(FamilyConfig):
    """InternLM 3: Llama with two keys for biases."""

    architecture = "InternLM3ForCausalLM"
    model_types = ("internlm3",)
    implementation = "llama:LlamaForCausalLM"

    max_position_embeddings: Count = 32768
    eos_token_id: Any = 2
    qkv_bias: bool = False
    bias: bool = False

    def biases(self) -> Biases:
        """Biases as set in config.json."""
        return Biases(self.qkv_bias, self.bias, self.bias)


FAMILIES = (InternLMConfig, InternLM2Config, InternLM3Config)
MULTIMODAL = (
    MultimodalConfig(
        architectures=("InternVLForConditionalGeneration",),
        model_type="internvl",
        texts={
            "qwen2": "Qwen2ForCausalLM",
            "qwen3": "Qwen3ForCausalLM",
            "qwen3_moe": "Qwen3MoeForCausalLM",
            "llama": "LlamaForCausalLM",
            "gpt_oss": "GptOssForCausalLM",
        },
        keys=words(
            """
            vision_config image_token_id image_seq_length downsample_ratio projector_hidden_act
            vision_feature_layer vision_feature_select_strategy
            """
        ),
        tensors=VISION_AND_PROJECTOR,
    ),
)
