"""A tiny random checkpoint of a family, and what it is compared with: transformers' own class, or a
reference where it has none."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, PreTrainedModel

from tests.support.checkpoints.reference import Mathematics, write_reference

VOCAB_SIZE = 97


@dataclass(frozen=True, kw_only=True)
class Patch:
    """Another value of an attribute of the code under test."""

    target: str
    """Module, colon, path of the attribute: "worker.models.layers.moe:Experts.forward"."""
    value: Any


Mutation = Mapping[str, Any] | Patch
"""Keys of config.json that then say something else, or changed code."""


class Model(Protocol):
    """What expected logits come from."""

    def __call__(self, input_ids: torch.Tensor) -> Any:
        """`.logits` [1, tokens, vocabulary] after each of the tokens [1, tokens]."""


@dataclass(frozen=True, kw_only=True)
class Specimen:
    """A family's checkpoint."""

    name: str = ""
    """Of transformers' classes, without Config and ForCausalLM; empty where it has none."""
    maths: Mathematics | None = None
    """What the family computes, where transformers has no class of it."""
    config: str = ""
    """The same of its configuration's class, where it has another name."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    mutations: Mapping[str, Mutation] = field(default_factory=dict)
    """By feature."""
    wrapper: str = ""
    """Of transformers' classes of a model with images or sound whose text part this is."""
    rewrite: (
        Callable[[dict[str, torch.Tensor], PreTrainedModel], dict[str, torch.Tensor]] | None
    ) = None
    """The tensors of its checkpoint made of those that transformers saves, where they are others;
    it may change transformers' model, too."""
    architecture: str = ""
    """What its config.json says of `architectures`; empty where transformers' name is the one."""
    lacks_head_dim: bool = False
    """Whether its configuration has none, so that a head is hidden_size / heads wide."""


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
_VISIONS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
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
"""By wrapper, the class of its other part's configuration, what that says, and what it says
itself."""


def write(specimen: Specimen, folder: Path) -> Model:
    """Saves the checkpoint and returns the model that it is compared with."""
    torch.manual_seed(3)
    if specimen.maths is not None:
        return write_reference(specimen.maths, folder)
    model_class, config = _class_and_config(specimen)
    model = model_class(config).float().eval()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            _draw(key, tensor)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=7, pad_token_id=0)
    model.save_pretrained(folder)
    if specimen.rewrite is not None:
        weights = folder / "model.safetensors"
        with torch.no_grad():
            tensors = specimen.rewrite(load_file(weights), model)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, weights)
    if specimen.architecture:
        file = folder / "config.json"
        said = {**json.loads(file.read_text()), "architectures": [specimen.architecture]}
        file.write_text(json.dumps(said))
    return cast("Model", model)


def write_config(specimen: Specimen, folder: Path) -> None:
    """Saves the checkpoint's config.json alone."""
    if specimen.maths is not None:
        (folder / "config.json").write_text(json.dumps(specimen.maths.config))
        return
    model_class, config = _class_and_config(specimen)
    config.architectures = [model_class.__name__]
    config.save_pretrained(folder)


def _class_and_config(specimen: Specimen) -> tuple[Any, Any]:
    """transformers' class of the model, and what it is made of."""
    settings = {**_SIZES, **specimen.settings}
    if specimen.lacks_head_dim:
        del settings["head_dim"]
    config = getattr(transformers, f"{specimen.config or specimen.name}Config")(**settings)
    if not specimen.wrapper:
        return getattr(transformers, f"{specimen.name}ForCausalLM"), config
    name = f"{specimen.wrapper}ForConditionalGeneration"
    return getattr(transformers, name), _wrapped(specimen.wrapper, config)


def _wrapped(name: str, text: Any) -> Any:
    """Of a model with images or sound, whose part for these is as small as can be."""
    vision_class, vision, further = _VISIONS[name]
    part = "audio_config" if name == "Voxtral" else "vision_config"
    return getattr(transformers, f"{name}Config")(
        text_config=text,
        **{part: getattr(transformers, vision_class)(**vision)},
        tie_word_embeddings=getattr(text, "tie_word_embeddings", False),
        **further,
    )


def _draw(key: str, tensor: torch.Tensor) -> None:
    """Initial values would hide features: biases of 0, norms of 1, layers that hardly count."""
    if not tensor.is_floating_point():
        return
    if key.endswith("A_log"):
        tensor.normal_(-2.0, 0.5)  # so that states last
    elif tensor.ndim == 0:
        tensor.uniform_(-0.5, 0.5)  # a number of an activation
    elif key.endswith("bias"):
        tensor.normal_(0.0, 0.3)
    elif tensor.ndim == 1:
        tensor.normal_(1.0, 0.3)
    elif "embed_tokens" in key or "lm_head" in key:
        tensor.normal_(0.0, 0.4)
    else:
        tensor.normal_(0.0, 1.5 * tensor.shape[-1] ** -0.5)
