"""What `quantization_config` in config.json says about the weights' format. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "fmt": ("e4m3", "float8_e4m3fn"),
    "activation_scheme": ("dynamic",),
    "dequantize": (False,),
    "scale_fmt": ("ue8m0",),
}
"""Keys, and the values under which weights are FP8 with block scales. Weights alone are quantized
here, so that `dynamic` scales of activations are not needed: the result is the more exact one.
`ue8m0` says that scales are powers of two, which as FP32 are what they are."""
_BESIDE_EXPERTS = ("self_attn", "mlp.router", "embed_tokens", "lm_head")
_READ = ("quant_method", "weight_block_size", "modules_to_not_convert")
_PLAIN_MODULES = (
    *("lm_head", "norm", "embed_tokens", "word_embeddings", "gate"),
    "e_score_correction_bias",
)
"""Ends of the names of modules that are never quantized."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Config:
    """FP8 weights (e4m3) with a scale per block, as DeepSeek and Qwen publish them."""

    block_shape: tuple[int, int]
    """Output and input features that share a scale."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mxfp4Config:
    """Experts of 4-bit floats, of which 32 share a power of two, as gpt-oss is published."""


def parse_quantization(
    raw: Mapping[str, Any], *, mxfp4: bool = False
) -> Fp8Config | Mxfp4Config | None:
    """The format of a checkpoint's linear weights; None where they are not quantized.

    Args:
        raw: the content of config.json.
        mxfp4: whether the family's experts may be MXFP4.

    Raises:
        ValueError: it is another format than FP8 in blocks.
    """
    config = raw.get("quantization_config")
    if not config:
        return None
    if mxfp4 and config.get("quant_method") == "mxfp4":
        return _parse_mxfp4(config)
    if config.get("quant_method") != "fp8":
        raise _unsupported(f"quant_method {config.get('quant_method')!r}")
    for key, value in config.items():
        if key in _NEUTRAL and value not in _NEUTRAL[key]:
            known = " or ".join(map(repr, _NEUTRAL[key]))
            raise _unsupported(f"{key} {value!r} (it must be {known})")
        if key not in _NEUTRAL and key not in _READ:
            raise _unsupported(f"the key {key}")
    others = [
        name
        for name in config.get("modules_to_not_convert") or ()
        if not str(name).endswith(_PLAIN_MODULES)
    ]
    if others:
        raise _unsupported(f"layers that are left out of it ({', '.join(others[:4])})")
    block = config.get("weight_block_size")
    if (
        not isinstance(block, list)
        or len(block) != 2
        or not all(isinstance(size, int) and size > 0 for size in block)
    ):
        raise _unsupported(f"weight_block_size {block!r} (it must be two positive integers)")
    return Fp8Config(block_shape=(block[0], block[1]))


def _parse_mxfp4(config: Mapping[str, Any]) -> Mxfp4Config:
    """All but experts must be left out of it."""
    modules = config.get("modules_to_not_convert")
    names = [str(name) for name in modules] if isinstance(modules, list) else []
    for plain in _BESIDE_EXPERTS:
        if not any(name.endswith(plain) for name in names):
            raise _unsupported(f"modules_to_not_convert without {plain}")
    others = [name for name in names if not name.endswith(_BESIDE_EXPERTS)]
    others += [key for key in config if key not in ("quant_method", "modules_to_not_convert")]
    if others:
        raise _unsupported(f"the key or module {others[0]}")
    return Mxfp4Config()


def _unsupported(what: str) -> ValueError:
    return ValueError(
        f"quantization_config in config.json has {what}, which is not supported: use the "
        "checkpoint's unquantized version, or FP8 with block scales (quant_method fp8)"
    )
