"""The compiled encoder equals torch, and each text has the bits that it has alone."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kernels.native import (
    EncoderLayerTensors,
    EncoderTensors,
    LinearTensors,
    NativeEncoder,
    NormTensors,
)

# Neither is a multiple of a block of columns (32).
HIDDEN, INNER, HEADS = 48, 80, 3
LENGTHS = (5, 130, 1, 16, 401, 33, 300)
"""More tokens than pass through the layers together with two threads, 1,024."""
FIRST_POSITION = 2


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape) / math.sqrt(shape[-1])


def _linear(outputs: int, inputs: int) -> LinearTensors:
    return LinearTensors(weight=_normal(outputs, inputs), bias=torch.randn(outputs))


def _norm() -> NormTensors:
    return NormTensors(weight=1.0 + 0.2 * torch.randn(HIDDEN), bias=0.2 * torch.randn(HIDDEN))


def _model(dtype: torch.dtype) -> EncoderTensors:
    torch.manual_seed(0)
    layers = [
        EncoderLayerTensors(
            qkv=_linear(3 * HIDDEN, HIDDEN),
            output=_linear(HIDDEN, HIDDEN),
            up=_linear(INNER, HIDDEN),
            down=_linear(HIDDEN, INNER),
            after_attention=_norm(),
            after_mlp=_norm(),
        )
        for _ in range(2)
    ]
    for layer in layers:
        for linear in (layer.qkv, layer.output, layer.up, layer.down):
            linear.weight.copy_(linear.weight.to(dtype))
    tables = [torch.randn(count, HIDDEN).to(dtype) for count in (60, 403, 2)]
    return EncoderTensors(
        num_heads=HEADS,
        head_dim=HIDDEN // HEADS,
        intermediate_size=INNER,
        eps=1e-5,
        words=tables[0],
        positions=tables[1],
        first_position=FIRST_POSITION,
        types=tables[2],
        norm=_norm(),
        num_layers=len(layers),
        layers=layers,
    )


def _expected(model: EncoderTensors, ids: torch.Tensor, types: torch.Tensor) -> torch.Tensor:
    def norm(x: torch.Tensor, norm: NormTensors) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, (HIDDEN,), norm.weight, norm.bias, model.eps)

    def linear(x: torch.Tensor, linear: LinearTensors) -> torch.Tensor:
        return torch.nn.functional.linear(x, linear.weight, linear.bias)

    places = model.positions[FIRST_POSITION : FIRST_POSITION + len(ids)]
    x = norm(model.words[ids].float() + places.float() + model.types[types].float(), model.norm)
    for layer in model.layers:
        q, k, v = (
            part.view(len(ids), HEADS, -1).transpose(0, 1)
            for part in linear(x, layer.qkv).chunk(3, dim=1)
        )
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        attended = attended.transpose(0, 1).flatten(1)
        x = norm(x + linear(attended, layer.output), layer.after_attention)
        inner = torch.nn.functional.gelu(linear(x, layer.up))
        x = norm(x + linear(inner, layer.down), layer.after_mlp)
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_texts_equal_torch_and_themselves_alone(dtype: torch.dtype) -> None:
    model = _model(dtype)
    generator = np.random.default_rng(0)
    pool = torch.from_numpy(generator.integers(0, 60, (8, 401)).astype(np.int32))
    rows = np.array([(7 - i, 0, length, 0) for i, length in enumerate(LENGTHS)], dtype=np.int64)
    types = torch.from_numpy(generator.integers(0, 2, sum(LENGTHS)))

    def as_packed(linear: LinearTensors) -> LinearTensors:
        return LinearTensors(weight=linear.weight.to(dtype), bias=linear.bias)

    def encoder(num_threads: int) -> NativeEncoder:
        names = ("qkv", "output", "up", "down")
        packed: list[EncoderLayerTensors] = []
        for layer in model.layers:
            linears: dict[str, Any] = {name: as_packed(getattr(layer, name)) for name in names}
            packed.append(replace(layer, **linears))
        fields: dict[str, Any] = {name: getattr(model, name) for name in model.__slots__}
        own = EncoderTensors(**{**fields, "layers": packed})
        return NativeEncoder(own, num_threads=num_threads, ms_per_thread=1e-4)

    two, one = encoder(2), encoder(1)
    hidden = two.forward(rows, pool, types)
    ends = np.cumsum(LENGTHS)
    for row, own, own_types in zip(rows, hidden.split(LENGTHS), types.split(LENGTHS), strict=True):
        slot, _, length, _ = row.tolist()
        expected = _expected(model, pool[slot, :length].long(), own_types)
        if dtype == torch.float32:
            torch.testing.assert_close(own, expected, atol=2e-5, rtol=1e-5)
        else:
            assert torch.cosine_similarity(own, expected).min() > 0.999
        alone = one.forward(row[None].copy(), pool, own_types)
        assert torch.equal(own, alone)
    # Only the first and the last token of each text.
    needed = np.unique(np.concatenate((ends - np.array(LENGTHS), ends - 1)))
    indices = torch.from_numpy(needed)
    assert torch.equal(two.forward(rows, pool, types, indices), hidden[indices])
    assert len(one.forward(rows, pool, types, indices[:0])) == 0
    assert torch.equal(one.forward(rows, pool), two.forward(rows, pool))  # types of 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 24}, "head size (24)"),
        ({"intermediate_size": 72}, "intermediate size (72)"),
        ({"head_dim": 32}, "3 heads of size 32"),
        ({"words": torch.zeros(4, HIDDEN, dtype=torch.float16)}, "torch.float16"),
    ],
)
def test_unsupported_encoders(changes: dict[str, Any], message: str) -> None:
    model = _model(torch.float32)
    fields = {name: getattr(model, name) for name in model.__slots__}
    with pytest.raises(AssertionError, match="rejected earlier"):
        NativeEncoder(EncoderTensors(**{**fields, **changes}), num_threads=1)
    reason = EncoderTensors(**{**fields, **changes}).unsupported()
    assert reason is not None
    assert message in reason
