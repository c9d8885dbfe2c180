"""Quantization formats of linear weights. Does not import torch.

The format is in config.json's `quantization_config`, or in a file next to it:
ModelOpt's hf_quant_config.json, GPTQ's quantize_config.json, AWQ's quant_config.json.

Weights are dequantized to the model's data type and multiplied by unquantized activations, except
FP8 weights in large steps on GPUs with FP8 matmuls (`kernels.linear.scaled`). Activation scales in
a checkpoint are ignored: each token gets its own scale, which is at least as accurate. Scales of
keys and values are loaded if the KV cache is FP8.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import translate
from functools import lru_cache
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaledConfig:
    """FP8 or INT8 weights with a scale per block."""

    code: Literal["e4m3", "int8"] = "e4m3"
    block_shape: tuple[int, int]
    """Numbers of output and input features that share a scale; 0 for all."""
    scale: str = "weight_scale"
    """Name of the scales in a checkpoint, within the module."""
    has_exponents: bool = False
    """Whether scales are powers of two, stored as exponents plus 127 (MXFP8)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedIntConfig:
    """4- or 8-bit integers, packed in 32-bit words, with a scale per group of input features."""

    layout: Literal["awq", "gptq", "compressed-tensors"]
    bits: int = 4
    group_size: int
    """Number of input features that share a scale, per output feature; 0 for all."""
    has_zeros: bool = True
    """Whether groups have zero points; otherwise the middle code represents 0."""
    zeros_less_one: bool = False
    """Whether zero points are stored minus 1, as in GPTQ's first format."""
    has_index: bool = False
    """Whether each feature has a group index (desc_act); otherwise groups consist of consecutive
    features."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp4Config:
    """4-bit floats (e2m1) with a scale per group of input features. NVFP4 has FP8 scales, and one
    scale for the whole weight; MXFP4's scales are powers of two."""

    layout: Literal["modelopt", "nvfp4", "mxfp4"]
    """Layout in a checkpoint: ModelOpt's NVFP4, or compressed-tensors' NVFP4 or MXFP4."""

    @property
    def group_size(self) -> int:
        """Number of input features that share a scale."""
        return 32 if self.layout == "mxfp4" else 16


@dataclass(frozen=True, kw_only=True, slots=True)
class GptOssMxfp4Config:
    """MXFP4 experts in the layout in which gpt-oss is published."""


WeightConfig = ScaledConfig | GroupedIntConfig | Fp4Config | GptOssMxfp4Config


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizationConfig:
    """Quantization format of a checkpoint's linear weights, and the modules that it applies to."""

    weights: WeightConfig | None
    """Format of all quantized modules; None if they have different ones (`by_module`)."""
    by_module: Mapping[str, WeightConfig] = field(default_factory=dict)
    """Formats by module name; each applies to all modules within that module."""
    left_out: tuple[str, ...] = ()
    """Patterns of modules that are not quantized."""
    targets: tuple[str, ...] = ()
    """Patterns of quantized modules, if only some are; empty for all that are not excluded."""
    renamed_ends: tuple[tuple[str, str], ...] = ()
    """Pairs of a tensor-name suffix in the checkpoint and the suffix that the loader expects."""
    skipped_ends: tuple[str, ...] = ()
    """Suffixes of names of tensors that are not loaded."""
    has_fp8_cache: bool = False
    """Whether the checkpoint specifies an FP8 KV cache with a scale per tensor."""

    def format_of(self, names: Sequence[str]) -> WeightConfig | None:
        """Format of a linear module; None if it is not quantized. `names` are all names that the
        checkpoint may have for it."""
        if _is_named(names, self.left_out):
            return None
        if self.weights is None:
            formats = (self._format_of_module(name) for name in names)
            return next((found for found in formats if found is not None), None)
        return self.weights if not self.targets or _is_named(names, self.targets) else None

    def _format_of_module(self, name: str) -> WeightConfig | None:
        """Format of a module in `by_module`, by its name or by the name of an enclosing module.
        A search by prefix would be slow: with experts, there are tens of thousands of names."""
        while name and name not in self.by_module:
            name = name.rpartition(".")[0]
        return self.by_module.get(name)


def _is_named(names: Sequence[str], patterns: tuple[str, ...]) -> bool:
    """Whether a pattern matches one of a module's names: a regular expression ("re:...") at its
    beginning, a pattern with "*" as a whole, and any other pattern as consecutive dot-separated
    parts, so that "gate" does not match "gate_proj"."""
    modules, expressions = _compiled(patterns)
    return any(expressions.match(name) or not modules.isdisjoint(_runs(name)) for name in names)


@lru_cache(maxsize=8)
def _compiled(patterns: tuple[str, ...]) -> tuple[frozenset[str], re.Pattern[str]]:
    """Patterns that are names, and all others as one regular expression. Comparing one pattern at a
    time would be quadratic: checkpoints list modules layer by layer."""
    expressions = [
        pattern[3:] if pattern.startswith("re:") else translate(pattern)
        for pattern in patterns
        if pattern.startswith("re:") or "*" in pattern
    ]
    names = frozenset(p for p in patterns if not p.startswith("re:") and "*" not in p)
    return names, re.compile("|".join(f"(?:{one})" for one in expressions) or r"(?!)")


def _runs(name: str) -> Iterator[str]:
    """All consecutive parts of a name: "a", "a.b" and "b" of "a.b"."""
    parts = name.split(".")
    for start in range(len(parts)):
        for end in range(start + 1, len(parts) + 1):
            yield ".".join(parts[start:end])
