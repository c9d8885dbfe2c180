"""How many keys the longest program of attention walks, and how many programs share the work."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from kernels.attention import AttentionMetadata, triton_decode
from kernels.attention.triton_backend import TritonAttention
from tests.support.cuda.counted import counting
from tests.support.cuda.tensors import DEVICE

NUM_SMS, PAGE_SIZE = 132, 16
NUM_QUERY_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
"""As Llama-3.1-8B has them."""


class Cost(NamedTuple):
    keys: int
    """That the longest program walks."""
    programs: int
    """Of the launch that walks them."""


def attend(seq_lens: Sequence[int], query_lens: Sequence[int] = ()) -> Cost:
    """What a decode, or an extend, of these rows costs in one layer."""
    with counting() as counter:
        starts = None
        if query_lens:
            starts = torch.zeros(len(query_lens) + 1, dtype=torch.int32, device=DEVICE)
        metadata = AttentionMetadata(
            page_table=torch.zeros(
                len(seq_lens), -(-max(seq_lens) // PAGE_SIZE), dtype=torch.int32, device=DEVICE
            ),
            seq_lens=torch.zeros(len(seq_lens), dtype=torch.int32, device=DEVICE),
            seq_lens_host=seq_lens,
            query_start=starts,
            query_lens_host=query_lens,
            page_size=PAGE_SIZE,
        )
        shape = (sum(query_lens) or len(seq_lens), NUM_QUERY_HEADS, HEAD_DIM)
        q = torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE)
        cache = torch.zeros(8, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM, dtype=q.dtype, device=DEVICE)
        TritonAttention().plan(metadata).forward(q, cache, cache, scale=1.0)
    grids = dict(counter.grids)
    if "_split_kernel" in grids:
        grid = grids["_split_kernel"]
        return Cost(-(-max(seq_lens) // grid[2]), math.prod(grid))
    return Cost(max(seq_lens), math.prod(grids["_extend_kernel"]))


STEPS: dict[str, tuple[Cost, Sequence[int], Sequence[int]]] = {
    "a row of 8k": (Cost(256, 256), [8192], ()),
    "4 rows of 128k": (Cost(8192, 512), 4 * [128 << 10], ()),
    "256 rows of 1k": (Cost(1024, 2048), 256 * [1024], ()),
    "a prompt of 8k": (Cost(8192, 2048), [8192], [8192]),
    # Beyond 8k, which wants splits by length:
    "a row of 100k among 64": (Cost(100_000, 512), [*(63 * [1000]), 100_000], ()),
    "a suffix of 64 on 30k": (Cost(30_064, 32), [30_064], [64]),
}
"""At most so many keys in one program, at least so many programs, for rows of these lengths with so
many queries each. Who splits better changes them."""


@pytest.mark.parametrize("name", STEPS)
def test_no_program_walks_further_than_it_does(name: str) -> None:
    budget, seq_lens, query_lens = STEPS[name]
    cost = attend(seq_lens, query_lens)
    assert cost.keys <= budget.keys
    assert cost.programs >= budget.programs


def test_longer_walks_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_decode, "MAX_SPLITS", 4)
    budget, seq_lens, _ = STEPS["4 rows of 128k"]
    assert attend(seq_lens).keys > budget.keys


def test_idle_multiprocessors_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_decode, "_TARGET_PROGRAMS", 64)
    budget, seq_lens, _ = STEPS["a row of 8k"]
    assert attend(seq_lens).programs < NUM_SMS < budget.programs
