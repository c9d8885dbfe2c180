"""adapter_config.json of a LoRA adapter, as PEFT saves it. Does not import torch.

Source: PEFT's `LoraConfig` (src/peft/tuners/lora/config.py). Which modules an adapter changes
follows from its tensors, so keys that only select modules for training are ignored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from worker.models.config.schema import short

_Value = TypeVar("_Value")

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
_MOST_CONFIG_BYTES = 1 << 20
"""Maximum size of adapter_config.json in bytes; typical files have a size of 1 kB."""
_MOST_HEADER_BYTES = 1 << 24
"""Maximum size of the header of adapter_model.safetensors in bytes: enough for 100,000 tensors with
entries of 150 bytes each."""
_FLOATS = frozenset(("F64", "F32", "F16", "BF16"))
"""Supported data types, as safetensors names them."""
_MOST_PATTERN_CHARS = 256
"""Maximum length of a pattern in characters."""
_MOST_QUANTIFIERS = 3
"""Maximum number of quantifiers in a pattern, which bounds the time to match it."""

_IGNORED = frozenset(
    {
        *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "corda_config"),
        *("eva_config", "exclude_modules", "inference_mode", "init_lora_weights", "layers_pattern"),
        *("layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout", "lora_ga_config"),
        *("megatron_config", "megatron_core", "peft_type", "peft_version", "qalora_group_size"),
        *("r", "rank_pattern", "revision", "runtime_config", "target_modules", "task_type"),
        *("use_rslora", "arrow_config", "ensure_weight_tying", "bias"),
    }
)
"""Keys that are not rejected as unsupported: they are checked separately, or do not change what an
adapter computes."""
_REMEDIES: Mapping[str, str] = {
    "use_dora": "train without DoRA, or merge the adapter into the model",
    "modules_to_save": "train without it, or merge the adapter into the model",
    "target_parameters": (
        "train without it (LoRA for experts is not supported), or merge the adapter into the model"
    ),
    "trainable_token_indices": "train without it, or merge the adapter into the model",
}
_SAVE = "save or download the adapter again"
_REMEDY = "train without it, or merge the adapter into the model"
_CHANGES_BASE = ("corda", "loftq", "lora_ga", "olora", "pissa")
"""Prefixes of values of `init_lora_weights` that change the base model's weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeftConfig:
    """Ranks and scales of a LoRA adapter."""

    rank: int
    alpha: float
    """Numerator of the LoRA scale (`lora_alpha`)."""
    is_rank_stabilized: bool
    """Whether the scale is alpha / sqrt(rank) (rsLoRA) instead of alpha / rank."""
    ties_weights: bool
    """Whether adapters of tied layers are also tied."""
    ranks: Mapping[str, int]
    """Ranks that differ from `rank`, by pattern of module names."""
    alphas: Mapping[str, float]
    """Numerators that differ from `alpha`, by pattern of module names."""

    def rank_of(self, module: str) -> int:
        """Rank of a module, by its name in the checkpoint."""
        return _by_pattern(self.ranks, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Factor applied to a module's LoRA output."""
        rank = self.rank_of(module)
        divisor = math.sqrt(rank) if self.is_rank_stabilized else rank
        return _by_pattern(self.alphas, module, self.alpha) / divisor


def read_peft_config(folder: Path, max_rank: int) -> PeftConfig:
    """Reads the adapter_config.json of an adapter.

    Args:
        folder: the adapter's folder.
        max_rank: maximum rank of a module (`--max-lora-rank`).

    Raises:
        ValueError: the file is missing or malformed, or the adapter is not supported; the message
            names the key.
    """
    raw = _read_json(folder)
    kind = raw.get("peft_type")
    if kind != "LORA":
        raise ValueError(
            f"peft_type {short(kind)} in {CONFIG_NAME} is not supported: use a LoRA adapter"
        )
    if raw.get("bias", "none") != "none":
        raise ValueError(f"bias {short(raw['bias'])} in {CONFIG_NAME} is not supported: {_REMEDY}")
    for key, value in raw.items():
        if value and key not in _IGNORED:
            remedy = _REMEDIES.get(key, _REMEDY)
            raise ValueError(f"{key} in {CONFIG_NAME} is not supported: {remedy}")
    initial = raw.get("init_lora_weights", True)
    if isinstance(initial, str) and initial.startswith(_CHANGES_BASE):
        raise ValueError(
            f"init_lora_weights {short(initial)} in {CONFIG_NAME} changes the base model: convert "
            "the adapter with save_pretrained(path_initial_model_for_weight_conversion=...)"
        )
    config = PeftConfig(
        rank=_number("r", raw.get("r")),
        alpha=_alpha("lora_alpha", raw.get("lora_alpha", 8)),
        is_rank_stabilized=bool(raw.get("use_rslora")),
        ties_weights=bool(raw.get("ensure_weight_tying")),
        ranks={k: _number(f"rank_pattern[{k!r}]", v) for k, v in _patterns(raw, "rank_pattern")},
        alphas={k: _alpha(f"alpha_pattern[{k!r}]", v) for k, v in _patterns(raw, "alpha_pattern")},
    )
    largest = max((config.rank, *config.ranks.values()))
    if largest > max_rank:
        raise ValueError(
            f"rank {largest} in {CONFIG_NAME} exceeds --max-lora-rank ({max_rank}): raise "
            "--max-lora-rank"
        )
    return config


def check_header(folder: Path) -> None:
    """Checks the header of an adapter's weights, in time independent of their size. The ranks check
    that names and shapes match the model's.

    Raises:
        ValueError: the file is missing, malformed or truncated, or has unsupported data types.
        OSError: it cannot be read.
    """
    path = folder / WEIGHTS_NAME
    if not path.is_file():
        raise ValueError(
            f"{folder} has no {WEIGHTS_NAME}: save the adapter with `safe_serialization=True`"
        )
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _MOST_HEADER_BYTES:
            raise ValueError(
                f"the header of {WEIGHTS_NAME} has {length} bytes, but at most "
                f"{_MOST_HEADER_BYTES} are supported: use an adapter saved by PEFT"
            )
        data = file.read(length)
    try:
        header = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not a safetensors file ({error}): {_SAVE}") from error
    if not isinstance(header, dict):
        raise ValueError(
            f"{path} is not a safetensors file (its header is not a JSON object): {_SAVE}"
        )
    end = 0
    for name, entry in header.items():
        if name != "__metadata__":
            end = max(end, _check_entry(name, entry))
    if (size := path.stat().st_size) != 8 + length + end:
        raise ValueError(
            f"{path} has {size} bytes, but its header specifies {8 + length + end}: copy it again"
        )


def _check_entry(name: str, entry: object) -> int:
    """End of a tensor's data, from its entry in the header. Raises ValueError if the entry is
    invalid or its data type is not supported."""
    match entry:
        case {"dtype": str(dtype), "shape": list(), "data_offsets": [int(), int(end)]}:
            if dtype not in _FLOATS:
                raise ValueError(
                    f"{name:.200} in {WEIGHTS_NAME} has type {dtype:.20}, but only "
                    f"{', '.join(sorted(_FLOATS))} are supported: save the adapter in one "
                    "of these types"
                )
            return end
    raise ValueError(
        f"{WEIGHTS_NAME} is corrupt: the header entry for {name:.200} is invalid; {_SAVE}"
    )


def _read_json(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise ValueError(f"{folder} has no {CONFIG_NAME}: specify a folder saved by PEFT")
    with path.open("rb") as file:
        data = file.read(_MOST_CONFIG_BYTES + 1)
    if len(data) > _MOST_CONFIG_BYTES:
        raise ValueError(
            f"{CONFIG_NAME} is larger than {_MOST_CONFIG_BYTES} bytes: use a folder saved by PEFT"
        )
    try:
        raw = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{CONFIG_NAME} is not valid JSON ({error}): fix it") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{CONFIG_NAME} must contain a JSON object: fix it")
    return raw


def _number(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(
            f"{name} in {CONFIG_NAME} must be a positive integer, got {short(value)}: fix it"
        )
    return value


def _alpha(name: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{name} in {CONFIG_NAME} must be a number, got {short(value)}: fix it")
    return float(value)


def _patterns(raw: Mapping[str, Any], key: str) -> list[tuple[str, object]]:
    """Values of a key by pattern, in the order in which PEFT tries them."""
    found = raw.get(key) or {}
    if not isinstance(found, dict):
        raise ValueError(f"{key} in {CONFIG_NAME} must be an object, got {short(found)}: fix it")
    for pattern in found:
        num_quantifiers = sum(map(pattern.count, "*+?"))
        is_simple = num_quantifiers <= _MOST_QUANTIFIERS and not set(pattern) & set("(){}")
        if len(pattern) > _MOST_PATTERN_CHARS or not is_simple:
            raise ValueError(
                f"pattern {short(pattern)} of {key} in {CONFIG_NAME} is not supported: use module "
                "names"
            )
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"{key} in {CONFIG_NAME}: {short(pattern)} is not a valid regular expression "
                f"({error}): fix it"
            ) from error
    return list(found.items())


def _by_pattern(values: Mapping[str, _Value], module: str, default: _Value) -> _Value:
    """The value of the first pattern that matches the end of a module's name, as in PEFT's
    `get_pattern_key`."""
    for pattern, value in values.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default
