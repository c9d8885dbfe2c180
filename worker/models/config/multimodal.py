"""Wrappers: checkpoints with more than a language model, such as a vision encoder. The parts of
config.json and the tensors of the text model are taken from them. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from worker.models.config.family import FamilyConfig
from worker.models.config.quantization import QuantizationConfig
from worker.models.config.schema import RawConfig, architectures, words


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorNames:
    """Differences between tensors' names in a checkpoint and those of the family."""

    renamed: tuple[tuple[str, str], ...] = ()
    """Prefixes of names in the checkpoint, and the family's; the first that matches is used."""
    renamed_ends: tuple[tuple[str, str], ...] = ()
    """Suffixes of names in the checkpoint, and the family's; all that match are used in turn."""
    skipped: tuple[str, ...] = ()
    """Prefixes of names of tensors that are not loaded."""
    skipped_ends: tuple[str, ...] = ()
    """Suffixes of names of tensors that are not loaded."""

    def own_name(self, name: str) -> str | None:
        """The family's name of a checkpoint's tensor; None for one that is not loaded."""
        if name.startswith(self.skipped) or name.endswith(self.skipped_ends):
            return None
        for end, own in self.renamed_ends:
            if name.endswith(end):
                name = name.removesuffix(end) + own
        for prefix, own in self.renamed:
            if name.startswith(prefix):
                return own + name.removeprefix(prefix)
        return name

    def checkpoint_names(self, own_name: str) -> list[str]:
        """Names that a checkpoint may have for a module: the family's, and those with other
        prefixes."""
        return [own_name] + [
            prefix + own_name.removeprefix(own)
            for prefix, own in self.renamed
            if own_name.startswith(own)
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wrapper:
    """A multimodal architecture whose text model is served."""

    model_type: str
    texts: Mapping[str, str]
    """Families of the text model, by `model_type` of text_config."""
    keys: frozenset[str]
    """Keys beside text_config that do not concern the text model."""
    tensors: TensorNames
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Values of missing keys of the text model, where they differ from the family's."""
    of_whole: tuple[str, ...] = ()
    """Keys of text_config that are ignored, as transformers ignores them there."""
    text_kind: str = ""
    """`model_type` of the text model for checkpoints without text_config, whose keys are then
    among the others; empty if text_config is required."""


_BOOKKEEPING = words("model_type transformers_version auto_map")


def _text_and(*parts: str) -> TensorNames:
    """Names for a text model in `language_model`, with these other parts, perhaps all within
    `model`."""
    return TensorNames(
        renamed=(("language_model.", ""), ("model.language_model.", "model.")),
        skipped=tuple(f"{before}{part}." for before in ("", "model.") for part in parts),
    )


_VISION_AND_PROJECTOR = _text_and("vision_tower", "multi_modal_projector")
_QWEN_VISION_KEYS = words(
    """
    vision_config image_token_id video_token_id vision_token_id vision_start_token_id
    vision_end_token_id
    """
)
_QWEN_VISION = TensorNames(
    renamed=(("model.language_model.", "model."),), skipped=("visual.", "model.visual.")
)

_KIMI = _Wrapper(
    model_type="kimi_k25",
    texts={"kimi_k2": "DeepseekV3ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM"},
    keys=words(
        """
        vision_config ignore_index media_placeholder_token_id use_unified_vision_chunk
        video_placeholder image_token_id video_token_id vision_start_token_id
        vision_end_token_id projection_hidden_size projection_layer_norm_eps
        """
    ),
    tensors=_text_and("vision_tower", "mm_projector"),
)

_WRAPPERS: Mapping[str, _Wrapper] = {
    "Mistral3ForConditionalGeneration": _Wrapper(
        model_type="mistral3",
        texts={
            "mistral": "MistralForCausalLM",
            "ministral3": "Ministral3ForCausalLM",
            "mistral4": "Mistral4ForCausalLM",
        },
        keys=words(
            """
            vision_config image_token_index image_token_id multimodal_projector_bias
            projector_hidden_act spatial_merge_size vision_feature_layer
            """
        ),
        tensors=_VISION_AND_PROJECTOR,
    ),
    "Gemma3ForConditionalGeneration": _Wrapper(
        model_type="gemma3",
        texts={"gemma3_text": "Gemma3ForCausalLM"},
        keys=words(
            """
            vision_config image_token_index image_token_id boi_token_index boi_token_id
            eoi_token_index eoi_token_id mm_tokens_per_image
            """
        ),
        tensors=_VISION_AND_PROJECTOR,
    ),
    "Gemma4ForConditionalGeneration": _Wrapper(
        model_type="gemma4",
        texts={"gemma4_text": "Gemma4ForCausalLM"},
        keys=words(
            """
            vision_config audio_config image_token_id video_token_id audio_token_id boi_token_id
            eoi_token_id boa_token_id eoa_token_id eoa_token_index vision_soft_tokens_per_image
            """
        ),
        tensors=TensorNames(
            renamed=(("model.language_model.", "model."),),
            skipped=tuple(
                f"model.{part}."
                for part in ("vision_tower", "embed_vision", "audio_tower", "embed_audio")
            ),
        ),
    ),
    "Llama4ForConditionalGeneration": _Wrapper(
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
    "Qwen2_5_VLForConditionalGeneration": _Wrapper(
        model_type="qwen2_5_vl",
        texts={"qwen2_5_vl_text": "Qwen2ForCausalLM"},
        keys=_QWEN_VISION_KEYS,
        tensors=_QWEN_VISION,
        defaults={
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 8,
            "rope_theta": 1000000.0,
            "max_window_layers": 80,
            "eos_token_id": 151645,
        },
        text_kind="qwen2_5_vl_text",
    ),
    "Qwen3_5ForConditionalGeneration": _Wrapper(
        model_type="qwen3_5",
        texts={"qwen3_5_text": "Qwen3_5ForCausalLM"},
        keys=_QWEN_VISION_KEYS,
        tensors=_QWEN_VISION,
    ),
    "Qwen3_5MoeForConditionalGeneration": _Wrapper(
        model_type="qwen3_5_moe",
        texts={"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"},
        keys=_QWEN_VISION_KEYS,
        tensors=_QWEN_VISION,
    ),
    "Qwen3VLForConditionalGeneration": _Wrapper(
        model_type="qwen3_vl",
        texts={"qwen3_vl_text": "Qwen3ForCausalLM"},
        keys=_QWEN_VISION_KEYS,
        tensors=_QWEN_VISION,
        defaults={"max_position_embeddings": 128000, "rope_theta": 500000.0},
    ),
    "Qwen3VLMoeForConditionalGeneration": _Wrapper(
        model_type="qwen3_vl_moe",
        texts={"qwen3_vl_moe_text": "Qwen3MoeForCausalLM"},
        keys=_QWEN_VISION_KEYS,
        tensors=_QWEN_VISION,
        defaults={
            "max_position_embeddings": 128000,
            "rope_theta": 500000.0,
            "num_key_value_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "norm_topk_prob": True,
        },
        of_whole=("tie_word_embeddings",),
    ),
    "KimiK25ForConditionalGeneration": _KIMI,
    "Kimi_K25ForConditionalGeneration": _KIMI,  # as transformers writes it
    "LlavaForConditionalGeneration": _Wrapper(
        model_type="llava",
        texts={"llama": "LlamaForCausalLM"},
        keys=words(
            """
            vision_config ignore_index image_token_index image_token_id image_seq_length
            multimodal_projector_bias projector_hidden_act vision_feature_layer
            vision_feature_select_strategy
            """
        ),
        tensors=_VISION_AND_PROJECTOR,
        defaults={
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
        },
    ),
    "VoxtralForConditionalGeneration": _Wrapper(
        model_type="voxtral",
        texts={"llama": "LlamaForCausalLM"},
        keys=words("audio_config audio_token_id projector_hidden_act"),
        tensors=_text_and("audio_tower", "multi_modal_projector"),
    ),
}
"""Wrappers by value of `architectures` in config.json."""

TEXTS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    name: (wrapper.model_type, tuple(dict.fromkeys(wrapper.texts.values())))
    for name, wrapper in _WRAPPERS.items()
}
"""`model_type`, and possible families of the text model, by value of `architectures`."""


def read_text_part(raw: RawConfig) -> tuple[RawConfig, TensorNames | None]:
    """The text model's config.json, and the names of its tensors in the checkpoint; for a
    checkpoint that is no wrapper, `raw` itself and None.

    Raises:
        ValueError: text_config is malformed, or its family is not supported.
    """
    names = architectures(raw)
    wrapper = next((_WRAPPERS[name] for name in names if name in _WRAPPERS), None)
    if wrapper is None:
        return raw, None
    if wrapper.text_kind and "text_config" not in raw:
        raw = {"model_type": wrapper.model_type, "text_config": {}, **raw}
    text = raw.get("text_config")
    if not isinstance(text, dict):
        raise ValueError(f"text_config in config.json must be an object, got {text!r:.80}")
    if raw.get("model_type", wrapper.model_type) != wrapper.model_type:
        raise ValueError(
            f"model_type {raw['model_type']!r} in config.json does not go with architectures "
            f"{names}, of model_type {wrapper.model_type}: repair it"
        )
    kind = str(text.get("model_type") or wrapper.text_kind)
    if kind not in wrapper.texts:
        raise ValueError(
            f"text_config.model_type {kind!r} in config.json is not supported (supported: "
            f"{', '.join(wrapper.texts)}): use another checkpoint"
        )
    text = {key: value for key, value in text.items() if key not in wrapper.of_whole}
    own: dict[str, Any] = {}
    for key, value in raw.items():
        if key in wrapper.keys or key in _BOOKKEEPING or key == "text_config":
            continue
        if value is not None and key != "architectures":
            own[key] = value  # the family refuses keys that it does not know
    if "tie_word_embeddings" in text:
        # At the top level transformers then writes the default of the whole model's class.
        own.pop("tie_word_embeddings", None)
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(table := {**text, **own}.get(key), dict):
            own[key] = _of_text(table)
    family = {"architectures": [wrapper.texts[kind]], "model_type": None}
    return {**wrapper.defaults, **text, **own, **family}, wrapper.tensors


def _of_text(rope: RawConfig) -> RawConfig:
    """Rope parameters without multimodal rotary embedding (mrope): dimensions that rotate by row,
    column or time of an image or video, which are all the position in text."""
    kept = {key: value for key, value in rope.items() if not key.startswith("mrope_")}
    return {key: "default" if value == "mrope" else value for key, value in kept.items()}


def with_skipped_tensors(
    names: TensorNames | None,
    family: FamilyConfig,
    quantization: QuantizationConfig | None,
) -> TensorNames | None:
    """Adds to the names of tensors that are not loaded: those that the family skips, layers for
    multi-token prediction, and those that the quantization format skips or renames."""
    skipped = family.skipped
    if family.skips_next_layers:
        skipped = (*skipped, f"model.layers.{family.num_hidden_layers}.")
    if skipped:
        names = names or TensorNames()
        names = replace(names, skipped=(*names.skipped, *skipped))
    if quantization is not None and (quantization.skipped_ends or quantization.renamed_ends):
        names = replace(
            names or TensorNames(),
            renamed_ends=quantization.renamed_ends,
            skipped_ends=quantization.skipped_ends,
        )
    return names
