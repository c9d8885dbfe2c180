"""LoRA case of benchmark `kernels`: rows of eight adapters in the q, k and v projections."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from deploy.benchmarks.kernels.case import Case, Shape
from kernels.lora import LoraPart, LoraTiles, LoraWeights, add_lora_, tile_arrays

_NUM_ADAPTERS, _RANK = 8, 16


def lora_case(shape: Shape, rows: int, device: torch.device, dtype: torch.dtype) -> Case:
    """Case that adds the LoRA outputs of `rows` tokens, which cycle through the adapters, to a
    layer's output."""
    q, kv = shape.q_heads * shape.head_dim, shape.kv_heads * shape.head_dim
    ends = (q, q + kv, q + 2 * kv)
    weights = LoraWeights.allocate(
        num_slots=_NUM_ADAPTERS,
        in_features=shape.hidden,
        parts=[LoraPart(*part) for part in ((0, q, 0), (q, ends[1], 1), (ends[1], ends[2], 2))],
        rank=_RANK,
        dtype=dtype,
        device=device,
        batch_invariant=False,
    )
    adapters = 1 + np.arange(rows, dtype=np.int32) % _NUM_ADAPTERS
    arrays = tile_arrays(adapters)
    slots, tokens = (torch.from_numpy(arrays[name]).to(device) for name in ("slots", "tokens"))
    x = torch.randn(rows, shape.hidden, device=device).to(dtype)
    out = torch.randn(rows, ends[2], device=device).to(dtype)
    run = partial(add_lora_, out, x, weights, LoraTiles(slots=slots, tokens=tokens))
    used = min(rows, _NUM_ADAPTERS)
    num_values = used * _RANK * (3 * shape.hidden + ends[2])
    return Case(
        op="add_lora_",
        shape=f"{rows} tokens of {used} adapters of rank {_RANK}, {shape.hidden} to {ends[2]}",
        run=run,
        num_bytes=num_values * dtype.itemsize + x.nbytes + 2.0 * out.nbytes,
        num_flops=2.0 * rows * _RANK * (3 * shape.hidden + ends[2]),
    )
