"""The formats of a checkpoint's linear weights, as config.json has them. No torch.

It says so in config.json's `quantization_config`, or in a file beside it: ModelOpt's
hf_quant_config.json, GPTQ's quantize_config.json, AWQ's quant_config.json.

Weights alone are quantized here: each is multiplied as what its code stands for, rounded to the
model's type, with activations as they are. Scales of activations, static or dynamic, and those of
keys and values are therefore not needed, and the result is the more exact one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaledConfig:
    """Weights of one byte, each the value of its code times its block's scale."""

    code: Literal["e4m3", "int8"] = "e4m3"
    block_shape: tuple[int, int]
    """Output and input features that share a scale; 0 where all do."""
    scale: str = "weight_scale"
    """Name of the scales in a checkpoint, behind the module's name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedIntConfig:
    """Whole numbers of 4 or 8 bits in words of 32, with a scale per group of input features."""

    layout: Literal["awq", "gptq", "compressed-tensors"]
    bits: int = 4
    group_size: int
    """Input features of an output feature that share a scale; 0 where all do."""
    has_zeros: bool = True
    """Whether groups have zero points; else the middle code is zero."""
    zeros_less_one: bool = False
    """Whether those are stored less one, as GPTQ's first version has them."""
    has_index: bool = False
    """Whether an index tells which features are a group, and not that they are neighbours."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp4Config:
    """4-bit floats (e2m1) with a scale per group of input features. NVFP4's is FP8, beside one of
    the whole weight; MXFP4's is a power of two."""

    layout: Literal["modelopt", "nvfp4", "mxfp4"]
    """ModelOpt's NVFP4, or one of compressed-tensors' two."""

    @property
    def group_size(self) -> int:
        """Input features that share a scale."""
        return 32 if self.layout == "mxfp4" else 16


@dataclass(frozen=True, kw_only=True, slots=True)
class GptOssMxfp4Config:
    """Experts of 4-bit floats, of which 32 share a power of two, as gpt-oss is published."""


WeightConfig = ScaledConfig | GroupedIntConfig | Fp4Config | GptOssMxfp4Config


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizationConfig:
    """The format of a checkpoint's linear weights, and which of them have it."""

    weights: WeightConfig | None
    """None where modules have formats of their own."""
    by_module: Mapping[str, WeightConfig] = field(default_factory=dict)
    """Formats of modules, by name, and of those within them."""
    left_out: tuple[str, ...] = ()
    """Patterns of modules that are not quantized."""
    targets: tuple[str, ...] = ()
    """Patterns of those that alone are; empty where all others are."""
    renamed_ends: tuple[tuple[str, str], ...] = ()
    """Ends of tensors' names, and what they are called here."""
    skipped_ends: tuple[str, ...] = ()
    """Ends of names of tensors that are not needed."""

    def format_of(self, names: Sequence[str]) -> WeightConfig | None:
        """How a linear module is held, None where it is not quantized; `names` are all that it may
        be called by."""
        if _is_named(names, self.left_out):
            return None
        if self.weights is None:
            own = (self._own_format(name) for name in names)
            return next((one for one in own if one is not None), None)
        return self.weights if not self.targets or _is_named(names, self.targets) else None

    def _own_format(self, name: str) -> WeightConfig | None:
        """Format of a module that may be within one that is named: not by comparison with all of
        them, who are tens of thousands where there are experts."""
        while name and name not in self.by_module:
            name = name.rpartition(".")[0]
        return self.by_module.get(name)


def _is_named(names: Sequence[str], patterns: Sequence[str]) -> bool:
    return any(_fits(pattern, name) for pattern in patterns for name in names)


def _fits(pattern: str, name: str) -> bool:
    """Regular expressions fit a name's beginning, wildcards a name; others name a module, or one
    within which it is, by any number of its parts: "gate" is not in "gate_proj"."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    if "*" in pattern:
        return fnmatchcase(name, pattern)
    return f".{pattern}." in f".{name}."
