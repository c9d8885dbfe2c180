"""A tiny random checkpoint of a family, and its reference model: the transformers class, or plain
torch if transformers does not support the family."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, PreTrainedModel

from tests.support.checkpoints.moe import MoeMathematics
from tests.support.checkpoints.reference import Mathematics, write_reference

VOCAB_SIZE = 97

LLAMA3_ROPE: Mapping[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
"""Rotary embedding of Llama 3, with scaling that takes effect within a test checkpoint's few
positions."""


@dataclass(frozen=True, kw_only=True)
class Patch:
    """Replacement of an attribute of the code under test."""

    target: str
    """Module, colon, path of the attribute: "worker.models.layers.moe:Experts.forward"."""
    value: Any


Mutation = Mapping[str, Any] | Patch
"""Changed config.json keys, or changed code."""


Trait = Literal["alone", "positions", "cache", "shards", "experts", "functions"]
"""Property of families. In `make test`, a few specimens represent all families that have it:

- alone: requests that run one at a time, and mutations that must change the output;
- positions: kinds of caches whose pages run out: all positions, windows, chunks, pages that layers
  share, sinks, latents, states of each kind;
- cache: kinds of caches that drafts and grammars change: all positions, windows, chunks, latents,
  states;
- shards: what ranks split: biases, fused tensors, experts, heads of several sizes, norms over all
  heads, latents;
- experts: experts in their own tensors or stacked, with biases, shared experts or groups, one
  expert per row;
- functions: functions of torch that other families do not use: SiLU, softplus, sigmoids, both
  GELUs.
"""
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


class Model(Protocol):
    """Source of the expected logits."""

    def __call__(self, input_ids: torch.Tensor) -> Any:
        """Returns `.logits` [1, tokens, vocabulary] after each token of `input_ids` [1, tokens]."""


@dataclass(frozen=True, kw_only=True)
class Specimen:
    """Test checkpoint of a family: the only place where a family is registered in the tests."""

    name: str = ""
    """Name of the transformers classes, without Config and ForCausalLM; empty if there are none."""
    maths: Mathematics | MoeMathematics | None = None
    """Reference of the family, if transformers does not support it."""
    config: str = ""
    """Name of the configuration class without Config, if it differs."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    mutations: Mapping[str, Mutation] = field(default_factory=dict)
    """Mutations, keyed by feature."""
    multimodal: str = ""
    """Name of the transformers classes of the multimodal model that has this text model."""
    rewrite: (
        Callable[[dict[str, torch.Tensor], PreTrainedModel], dict[str, torch.Tensor]] | None
    ) = None
    """Converts the tensors that transformers saves to the checkpoint's, if they differ. It may also
    change the transformers model."""
    rewrite_config: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    """Converts the config.json that transformers saves to the checkpoint's, if they differ in more
    than `architecture`."""
    architecture: str = ""
    """Value of `architectures`; empty uses transformers' value."""
    wrapper: str = ""
    """`model_type` of a multimodal model in whose config.json this is the text_config, if
    transformers' class of it needs a library that is not installed; `architecture` is its class."""
    lacks_head_dim: bool = False
    """Whether the configuration has no head_dim, so that it is hidden_size / heads."""
    covers: tuple[Trait, ...] = ()
    """Traits that this checkpoint represents in `make test`; `make check-long` runs all
    checkpoints."""
    is_variant: bool = False
    """Whether the layers equal those of other test checkpoints except for names or sizes, so that
    only `make check-long` runs this one."""

    @property
    def served_architecture(self) -> str:
        """Value of `architectures` in config.json."""
        if self.architecture:
            return self.architecture
        if self.multimodal:
            return f"{self.multimodal}ForConditionalGeneration"
        if self.maths is not None:
            return str(self.maths.config["architectures"][0])
        return f"{self.name}ForCausalLM"

    @property
    def reference(self) -> str:
        """Source of the expected logits."""
        return "transformers" if self.maths is None else "independent reference"

    @property
    def keys(self) -> Mapping[str, Any]:
        """config.json keys, except for the sizes that all test checkpoints share."""
        return self.settings if self.maths is None else self.maths.config

    @property
    def num_experts(self) -> int:
        """Number of routed experts; 0 for a dense model."""
        return next((self.keys[key] for key in _EXPERT_KEYS if key in self.keys), 0)


_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-3,
    "bos_token_id": 1,
    "eos_token_id": 7,
    "pad_token_id": 0,
    "dtype": "float32",
}
_IMAGES = {"image_size": 16, "patch_size": 8, "hidden_size": 16, "intermediate_size": 16}
_QWEN_IMAGES = {
    **{"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 1, "patch_size": 8},
    "out_hidden_size": 64,
}
_ONE_LAYER = {"num_hidden_layers": 1, "num_attention_heads": 1}
_GLM_IMAGES = {
    **{"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 1, "patch_size": 8},
    **{"image_size": 16, "out_hidden_size": 64},
}
_VISIONS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Exaone4_5_": (
        "Exaone4_5_VisionConfig",
        {**_QWEN_IMAGES, "num_key_value_heads": 1, "fullatt_block_indexes": [0]},
        {},
    ),
    "Glm4v": ("Glm4vVisionConfig", _GLM_IMAGES, {}),
    "Glm46V": ("Glm4vVisionConfig", _GLM_IMAGES, {}),
    "Glm4vMoe": ("Glm4vMoeVisionConfig", _GLM_IMAGES, {}),
    "Idefics3": ("Idefics3VisionConfig", {**_IMAGES, **_ONE_LAYER}, {}),
    "InternVL": ("InternVLVisionConfig", {**_IMAGES, **_ONE_LAYER}, {}),
    "Lfm2Vl": (
        "Siglip2VisionConfig",
        {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_patches": 4,
            "patch_size": 8,
            **_ONE_LAYER,
        },
        {"projector_hidden_size": 16},
    ),
    "LlavaNext": ("CLIPVisionConfig", {**_IMAGES, **_ONE_LAYER}, {}),
    "LlavaOnevision": ("SiglipVisionConfig", {**_IMAGES, **_ONE_LAYER}, {}),
    "Qwen2VL": (
        "Qwen2VLVisionConfig",
        {**{"depth": 1, "embed_dim": 16, "num_heads": 1, "patch_size": 8}, "hidden_size": 64},
        {},
    ),
    "SmolVLM": ("SmolVLMVisionConfig", {**_IMAGES, **_ONE_LAYER}, {}),
    "Step3p7": (
        "Step3p7VisionConfig",
        {"image_size": 16, "patch_size": 8, "hidden_size": 16, **_ONE_LAYER, "mlp_ratio": 1.0},
        {},
    ),
    "Mistral3": ("PixtralVisionConfig", {**_IMAGES, **_ONE_LAYER, "head_dim": 16}, {}),
    "Gemma3": (
        "SiglipVisionConfig",
        {**_IMAGES, **_ONE_LAYER},
        {"mm_tokens_per_image": 4, "image_token_index": 90, "boi_token_index": 91},
    ),
    "Gemma4": (
        "Gemma4VisionConfig",
        {**_IMAGES, **_ONE_LAYER, "num_key_value_heads": 1, "head_dim": 16},
        {},
    ),
    "Gemma4Unified": (
        "Gemma4UnifiedVisionConfig",
        {
            "patch_size": 8,
            "pooling_kernel_size": 1,
            "mm_embed_dim": 64,
            "mm_posemb_size": 4,
            "output_proj_dims": 64,
        },
        {},
    ),
    "Llama4": (
        "Llama4VisionConfig",
        {
            **{**_IMAGES, **_ONE_LAYER, "intermediate_size": 64},
            "vision_output_dim": 16,
            "projector_input_dim": 16,
            "projector_output_dim": 16,
        },
        {},
    ),
    "Qwen2_5_VL": ("Qwen2_5_VLVisionConfig", {**_QWEN_IMAGES, "fullatt_block_indexes": [0]}, {}),
    "Qwen3_5": ("Qwen3_5VisionConfig", _QWEN_IMAGES, {}),
    "Qwen3_5Moe": ("Qwen3_5MoeVisionConfig", _QWEN_IMAGES, {}),
    "Qwen3VLMoe": (
        "Qwen3VLMoeVisionConfig",
        {**_QWEN_IMAGES, "deepstack_visual_indexes": []},
        {},
    ),
    "Kimi_K25": ("Kimi_K25VisionConfig", {**_IMAGES, **_ONE_LAYER}, {"projection_hidden_size": 16}),
    "Llava": ("CLIPVisionConfig", {**_IMAGES, **_ONE_LAYER}, {}),
    "Voxtral": (
        "VoxtralEncoderConfig",
        {"hidden_size": 16, "intermediate_size": 64, **_ONE_LAYER},
        {},
    ),
    "Qwen3VL": ("Qwen3VLVisionConfig", {**_QWEN_IMAGES, "deepstack_visual_indexes": []}, {}),
}
"""Encoder of each multimodal model: configuration class, its settings, and the whole model's
settings."""


def write(specimen: Specimen, folder: Path) -> Model:
    """Saves the checkpoint and returns its reference model."""
    torch.manual_seed(3)
    if isinstance(specimen.maths, MoeMathematics):
        return specimen.maths.write(folder)
    if specimen.maths is not None:
        return write_reference(specimen.maths, folder)
    model_class, config = _class_and_config(specimen)
    model = model_class(config).float().eval()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            draw(key, tensor)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=7, pad_token_id=0)
    model.save_pretrained(folder)
    if specimen.rewrite is not None:
        weights = folder / "model.safetensors"
        with torch.no_grad():
            tensors = specimen.rewrite(load_file(weights), model)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, weights)
    _rewrite_config(specimen, folder / "config.json")
    return cast("Model", model)


def _rewrite_config(specimen: Specimen, file: Path) -> None:
    """Applies the test checkpoint's changes to config.json."""
    content = json.loads(file.read_text())
    if specimen.rewrite_config is not None:
        content = specimen.rewrite_config(content)
    if specimen.wrapper:
        content = {"model_type": specimen.wrapper, "text_config": content}
    if specimen.architecture:
        content["architectures"] = [specimen.architecture]
    file.write_text(json.dumps(content))


def write_config(specimen: Specimen, folder: Path) -> None:
    """Saves only config.json."""
    if specimen.maths is not None:
        (folder / "config.json").write_text(json.dumps(specimen.maths.config))
        return
    model_class, config = _class_and_config(specimen)
    config.architectures = [model_class.__name__]
    config.save_pretrained(folder)
    _rewrite_config(specimen, folder / "config.json")


def settings_of(specimen: Specimen) -> dict[str, Any]:
    """Arguments of the transformers configuration class."""
    settings = {**_SIZES, **specimen.settings}
    if specimen.lacks_head_dim:
        del settings["head_dim"]
    return settings


def config_class(specimen: Specimen) -> Any:
    """The transformers configuration class, which is imported lazily (0.7 s)."""
    return getattr(transformers, f"{specimen.config or specimen.name}Config")


def text_config(specimen: Specimen) -> Any:
    """The transformers configuration of the language model."""
    return config_class(specimen)(**settings_of(specimen))


def _class_and_config(specimen: Specimen) -> tuple[Any, Any]:
    """The transformers class of the model, and its configuration."""
    config = text_config(specimen)
    if not specimen.multimodal:
        return getattr(transformers, f"{specimen.name}ForCausalLM"), config
    name = f"{specimen.multimodal}ForConditionalGeneration"
    return getattr(transformers, name), _wrapped(specimen.multimodal, config)


def _wrapped(name: str, text: Any) -> Any:
    """Configuration of a multimodal model with the smallest possible encoder."""
    vision_class, vision, further = _VISIONS[name]
    part = "audio_config" if name == "Voxtral" else "vision_config"
    return getattr(transformers, f"{name}Config")(
        text_config=text,
        **{part: getattr(transformers, vision_class)(**vision)},
        tie_word_embeddings=getattr(text, "tie_word_embeddings", False),
        **further,
    )


def draw(key: str, tensor: torch.Tensor) -> None:
    """Sets random values, because the initial values hide features: biases of 0, norms of 1, small
    layers."""
    if not tensor.is_floating_point():
        return
    if key.endswith("A_log"):
        tensor.normal_(-2.0, 0.5)  # slow decay of states
    elif tensor.ndim == 0:
        tensor.uniform_(-0.5, 0.5)  # a scalar of an activation
    elif key.endswith("bias"):
        tensor.normal_(0.0, 0.3)
    elif tensor.ndim == 1:
        tensor.normal_(1.0, 0.3)
    elif "embed_tokens" in key or "lm_head" in key:
        tensor.normal_(0.0, 0.4)
    else:
        tensor.normal_(0.0, 1.5 * tensor.shape[-1] ** -0.5)
