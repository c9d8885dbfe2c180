"""Multimodal checkpoints, of which only the text model is served: its part of config.json, and its
tensors. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from worker.models.config.schema import RawConfig, architectures, short, words


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorNames:
    """Differences between tensor names in a checkpoint and in the family."""

    renamed: tuple[tuple[str, str], ...] = ()
    """Pairs of a name prefix in the checkpoint and the family's prefix; the first match is used."""
    renamed_ends: tuple[tuple[str, str], ...] = ()
    """Pairs of a name suffix in the checkpoint and the family's suffix; all matches are applied in
    turn."""
    skipped: tuple[str, ...] = ()
    """Name prefixes of tensors that are not loaded, as in the checkpoint or as in the family."""
    skipped_ends: tuple[str, ...] = ()
    """Name suffixes of tensors that are not loaded."""

    def internal_name(self, name: str) -> str | None:
        """The family's name of a checkpoint's tensor; None if it is not loaded."""
        if name.startswith(self.skipped) or name.endswith(self.skipped_ends):
            return None
        for end, new_end in self.renamed_ends:
            if name.endswith(end):
                name = name.removesuffix(end) + new_end
        for prefix, new_prefix in self.renamed:
            if name.startswith(prefix):
                name = new_prefix + name.removeprefix(prefix)
                break
        return None if name.startswith(self.skipped) else name

    def checkpoint_names(self, internal_name: str) -> list[str]:
        """Names that a module may have in a checkpoint: the family's, and those with other
        prefixes."""
        return [internal_name] + [
            prefix + internal_name.removeprefix(new_prefix)
            for prefix, new_prefix in self.renamed
            if internal_name.startswith(new_prefix)
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class MultimodalConfig:
    """A multimodal architecture of which only the text model is served."""

    architectures: tuple[str, ...]
    """Values of `architectures` in config.json."""
    model_type: str
    texts: Mapping[str, str]
    """Families of the text model, by `model_type` of text_config, or by its `architectures` if
    `model_type` is missing."""
    keys: frozenset[str]
    """Keys next to text_config, and possibly within it, that do not concern the text model."""
    tensors: TensorNames
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Values of missing keys of the text model that differ from the family's and from `SIZES`."""
    ignored: tuple[str, ...] = ()
    """Keys of text_config that are ignored, as in transformers."""
    text_type: str = ""
    """`model_type` of the text model for checkpoints without text_config, which have its keys at
    the top level; empty if text_config is required."""

    def text_config(self, raw: RawConfig) -> RawConfig:
        """The text model's config.json; raises ValueError if text_config is malformed, or the
        family is not supported."""
        if self.text_type and "text_config" not in raw:
            nested = {"model_type": self.text_type}
            raw = {"model_type": self.model_type, "text_config": nested, **raw}
        text = raw.get("text_config")
        if not isinstance(text, dict):
            raise ValueError(
                f"text_config in config.json must be an object, got {short(text)}: fix it"
            )
        if raw.get("model_type", self.model_type) != self.model_type:
            raise ValueError(
                f"model_type {short(raw['model_type'])} in config.json does not match "
                f"architectures {raw['architectures']}, which require model_type "
                f"{self.model_type}: fix it"
            )
        named = architectures(text)[:1] if "model_type" not in text else []
        kind = str(text.get("model_type") or "".join(map(str, named)))
        if kind not in self.texts:
            raise ValueError(
                f"text_config.model_type {short(kind)} in config.json is not supported "
                f"(supported: {', '.join(self.texts)}): use another checkpoint"
            )
        unread = self.keys | {*self.ignored}
        text = {key: value for key, value in text.items() if key not in unread}
        # The family's schema rejects keys that it does not have.
        others: dict[str, Any] = {
            key: value
            for key, value in raw.items()
            if value is not None and key not in self.keys | _BOOKKEEPING
        }
        # As in transformers, text_config has precedence: keys next to it may be defaults of the
        # whole model's class. Only the quantization format is read from the whole checkpoint.
        formats = {key: others[key] for key in _FORMATS if key in others}
        merged = {**SIZES.get(kind, {}), **self.defaults, **others, **text, **formats}
        for key in ("rope_scaling", "rope_parameters"):
            if isinstance(table := merged.get(key), dict):
                merged[key] = _of_text(table)
        return {**merged, "architectures": [self.texts[kind]], "model_type": None}


_LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
SIZES: Mapping[str, Mapping[str, int]] = {
    "llama": _LLAMA,
    "mistral": {**_LLAMA, "intermediate_size": 14336},
    "qwen2": {**_LLAMA, "vocab_size": 151936, "intermediate_size": 22016},
    "qwen3": {**_LLAMA, "vocab_size": 151936, "intermediate_size": 22016},
}
"""Sizes missing from a text_config because they equal the defaults of its class in transformers,
which saves only differences; by `model_type`."""
_FORMATS = ("quantization_config", "compression_config", "dtype", "torch_dtype")
_BOOKKEEPING = words("architectures model_type text_config transformers_version auto_map")


def language_model_and(*parts: str) -> TensorNames:
    """Tensor names of a checkpoint whose text model is the module `language_model`; the modules
    `parts` are skipped. All of these modules may be submodules of `model`."""
    return TensorNames(
        renamed=(("language_model.", ""), ("model.language_model.", "model.")),
        skipped=tuple(f"{before}{part}." for before in ("", "model.") for part in parts),
    )


VISION_AND_PROJECTOR = language_model_and("vision_tower", "multi_modal_projector")


def _of_text(rope: RawConfig) -> RawConfig:
    """Rope parameters without mrope (multimodal rotary embedding), whose row, column and time
    indices all equal the position for text."""
    kept = {key: value for key, value in rope.items() if not key.startswith("mrope_")}
    return {key: "default" if value == "mrope" else value for key, value in kept.items()}
