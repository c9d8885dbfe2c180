"""A small model with random weights for the compiled library, and a driver that runs it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kernels.native import (
    LayerTensors,
    LinearTensors,
    ModelTensors,
    NativeDecoder,
)

HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCAB, PAGE = 64, 90, 6, 2, 48, 90, 16


def make_model(
    dtype: torch.dtype, *, num_layers: int = 2, qk_norm: bool = True, block_size: int = 1
) -> ModelTensors:
    generator = torch.Generator().manual_seed(1)

    def weight(*shape: int) -> torch.Tensor:
        scale: float = shape[-1] ** -0.5
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    def linear(n: int, k: int) -> LinearTensors:
        return LinearTensors(weight=weight(n, k), bias=weight(n))

    def norm(size: int) -> torch.Tensor:
        return (1 + 0.1 * torch.randn(size, generator=generator)).to(dtype)

    angles = torch.outer(torch.arange(300.0), 0.3 ** torch.arange(DIM // 2))
    embedding = torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype)
    return ModelTensors(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        eps=1e-5,
        scale=DIM**-0.5,
        cos_sin=torch.cat((angles.cos(), angles.sin()), dim=-1),
        embedding=embedding,
        vocab_start=0,
        lm_head=embedding,
        final_norm=norm(HIDDEN),
        num_layers=num_layers,
        intermediate_size=INNER,
        block_size=block_size,
        layers=[
            LayerTensors(
                qkv=linear((HEADS + 2 * KV_HEADS) * DIM, HIDDEN),
                output=linear(HIDDEN, HEADS * DIM),
                gate_up=linear(2 * INNER, HIDDEN),
                down=linear(HIDDEN, INNER),
                input_norm=norm(HIDDEN),
                post_attention_norm=norm(HIDDEN),
                q_norm=norm(DIM) if qk_norm else None,
                k_norm=norm(DIM) if qk_norm else None,
            )
            for _ in range(num_layers)
        ],
    )


class Bench:
    """A decoder with its tables; pages of requests are scattered."""

    def __init__(self, model: ModelTensors, *, num_threads: int = 1, poison: float = 0.0) -> None:
        # Passes of this size would not use other threads by default.
        self.decoder = NativeDecoder(
            model, page_size=PAGE, num_threads=num_threads, ms_per_thread=1e-9
        )
        empty = torch.full((64, PAGE, KV_HEADS, DIM), poison, dtype=model.embedding.dtype)
        self.caches = [(empty.clone(), empty.clone()) for _ in range(model.num_layers)]
        self.decoder.bind(self.caches)
        self.tokens = torch.randint(0, VOCAB, (3, 300), dtype=torch.int32)
        pages = np.random.default_rng(0).permutation(63) + 1
        self.pages = torch.from_numpy(pages[:60].reshape(3, 20).astype(np.int32))

    def run(
        self, *rows: tuple[int, int, int], logits_indices: Sequence[int] | None = None
    ) -> torch.Tensor:
        table = np.array([(*row, 1) for row in rows], dtype=np.int64)
        chosen = None if logits_indices is None else torch.tensor(logits_indices, dtype=torch.int64)
        return self.decoder.forward(table, self.tokens, self.pages, chosen)
