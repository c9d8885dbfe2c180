"""Which class implements which architecture."""

from __future__ import annotations

from worker.models.config import ARCHITECTURES, ModelConfig
from worker.models.decoder import DecoderModel
from worker.models.linear import LayerOptions
from worker.models.llada2 import LLaDA2MoeModelLM
from worker.models.llama import LlamaForCausalLM
from worker.models.mistral import MistralForCausalLM
from worker.models.qwen2 import Qwen2ForCausalLM
from worker.models.qwen3 import Qwen3ForCausalLM
from worker.models.qwen3_moe import Qwen3MoeForCausalLM
from worker.models.sdar import SDARForCausalLM
from worker.models.sdar_moe import SDARMoeForCausalLM


def model_class(architecture: str) -> type[DecoderModel]:
    """The class for a value of `architectures` in config.json."""
    classes: dict[str, type[DecoderModel]] = {
        "LlamaForCausalLM": LlamaForCausalLM,
        "MistralForCausalLM": MistralForCausalLM,
        "Qwen2ForCausalLM": Qwen2ForCausalLM,
        "Qwen3ForCausalLM": Qwen3ForCausalLM,
        "Qwen3MoeForCausalLM": Qwen3MoeForCausalLM,
        "SDARForCausalLM": SDARForCausalLM,
        "SDARMoeForCausalLM": SDARMoeForCausalLM,
        "LLaDA2MoeModelLM": LLaDA2MoeModelLM,
    }
    assert tuple(classes) == ARCHITECTURES, "config.py and the registry name the same"
    return classes[architecture]


def build_model(config: ModelConfig, options: LayerOptions, max_model_len: int) -> DecoderModel:
    """A model with unset weights. Raises ValueError where the ranks cannot share it evenly."""
    return model_class(config.architecture)(config, options, max_model_len)
