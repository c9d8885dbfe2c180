"""Block-sparse attention's Triton kernels against the torch references; run as `triton_cases`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels import BlockSelection, attend_to_blocks, registry, select_blocks
from tests.support.kernels.sparse_cases import PAGE, make_queries


def block_selection_case(device: str, dtype: torch.dtype) -> None:
    """Checks several decodes, and a prompt of several tiles of queries; blocks of several pages, of
    parts of pages, and not aligned with pages; numbers of heads and dimensions that are not powers
    of 2."""
    for block_size, num_blocks, num_heads, dim in ((32, 2, 3, 24), (8, 3, 2, 32), (12, 3, 5, 20)):
        counts = [[90, 3, 31], list(range(50, 90))]
        queries = make_queries(device, counts, block_size * num_blocks)
        cache = torch.randn(40, PAGE, 1, dim).to(device, dtype)
        q = torch.randn(len(queries.positions), num_heads, dim).to(device, dtype)
        table = torch.randn(91, dim // 2 // 2 * 2).to(device)
        found = []
        for name in ("torch", "triton"):
            with registry.using(name):
                found.append(
                    select_blocks(q.clone(), cache, queries, block_size, cos_sin_cache=table)
                )
        assert torch.equal(found[0].runs, found[1].runs)
        assert torch.equal(found[0].hidden, found[1].hidden)


def block_attention_case(device: str, dtype: torch.dtype) -> None:
    """Checks one split, and several splits, some of which are empty for a query with few blocks."""
    for count, num_heads, kv_heads, dim, length, num_runs in (
        (3, 10, 2, 24, 4, 6),
        (2, 4, 1, 16, 16, 40),
    ):
        caches = tuple(torch.randn(60, 16, kv_heads, dim).to(device, dtype) for _ in range(2))
        runs = torch.stack(
            [torch.randperm(60 * 16 // length)[:num_runs] * length for _ in range(count * kv_heads)]
        )
        runs = runs.view(count, kv_heads, -1).sort(-1).values
        runs[0, :, 2:] = -1
        selection = BlockSelection(
            runs.int().to(device), torch.arange(count, device=device) % length, length
        )
        q = torch.randn(count, num_heads, dim).to(device, dtype)
        found = []
        for name in ("torch", "triton"):
            with registry.using(name):
                found.append(attend_to_blocks(q, (caches[0], caches[1]), selection, scale=0.2))
        tolerance = 2e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(*found, rtol=tolerance, atol=tolerance)


BLOCK_CASES: list[Callable[[str, torch.dtype], None]] = [block_selection_case, block_attention_case]
