"""Scales of FP8 KV caches in checkpoints, and formats that specify such caches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints.families import write_specimen
from tests.support.checkpoints.fp8 import write_fp8
from tests.support.engines.plan_driver import make_runner
from worker.models.config.quantization_formats import read_quantization


def add_scales(folder: Path, scales: dict[str, float], **settings: Any) -> None:
    """Adds scales to layer 0 of a checkpoint, and keys to its quantization_config."""
    path, config = folder / "model.safetensors", folder / "config.json"
    own = {f"model.layers.0.self_attn.{name}": torch.tensor(x) for name, x in scales.items()}
    save_file({**load_file(path), **own}, path, metadata={"format": "pt"})
    raw = json.loads(config.read_text())
    if settings:
        raw["quantization_config"] |= settings
    config.write_text(json.dumps(raw))


def loaded(folder: Path, **options: Any) -> list[tuple[float, float]]:
    """Scales of keys and values by layer."""
    model: Any = make_runner(str(folder), **options).model
    scales = [layer.attention.cache_scales for layer in model.layers]
    return [(one.key, one.value) for one in scales]


@pytest.mark.parametrize(
    ("scales", "expected"),
    [
        ({"k_proj.k_scale": 0.5, "v_proj.v_scale": 0.25}, (0.5, 0.25)),
        ({"k_scale": [0.5], "v_scale": [0.25]}, (0.5, 0.25)),
        ({"kv_scale": 2.0}, (2.0, 2.0)),
    ],
    ids=["ModelOpt", "compressed-tensors", "AutoFP8"],
)
def test_scales_are_read_by_every_name(
    tmp_path: Path, scales: dict[str, Any], expected: tuple[float, float]
) -> None:
    """Those of other layers are 1, and all are if the cache has another type."""
    torch.set_num_threads(1)
    write_fp8("llama", tmp_path / "own", tmp_path / "plain")
    add_scales(tmp_path / "own", scales, kv_cache_scheme="static")
    first, *others = loaded(tmp_path / "own", kv_cache_dtype="fp8")
    assert first == expected
    assert set(others) == {(1.0, 1.0)}
    assert set(loaded(tmp_path / "own")) == {(1.0, 1.0)}, "auto is the compute type on CPU"


def test_scales_of_latents_must_be_positive(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    write_specimen("deepseek-v3", tmp_path)
    add_scales(tmp_path, {"k_scale": -1.0})
    with pytest.raises(
        ValueError, match=r"layers.0.self_attn.k_scale is -1, .* must be greater than 0"
    ):
        make_runner(str(tmp_path), kv_cache_dtype="fp8")


@pytest.mark.parametrize(
    ("settings", "has_fp8_cache"),
    [
        ({"quant_method": "fp8", "kv_cache_scheme": "static"}, True),
        ({"quant_method": "fp8", "kv_cache_scheme": None}, False),
        ({"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, True),
        ({"quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"}, False),
        ({"quant_algo": "FP8", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, True),
        ({"quant_algo": "FP8", "kv_cache_scheme": {"num_bits": 8, "type": "int"}}, False),
        (
            {
                "quant_algo": "FP8",
                "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "attn_head"},
            },
            False,
        ),
        (
            {
                "quant_algo": "FP8",
                "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": True},
            },
            False,
        ),
    ],
)
def test_formats_specify_fp8_caches(
    settings: dict[str, Any], has_fp8_cache: bool, tmp_path: Path
) -> None:
    found = read_quantization({"quantization_config": settings}, tmp_path)
    assert found is not None
    assert found.has_fp8_cache == has_fp8_cache
