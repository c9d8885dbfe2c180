"""Sparse attention's Triton kernels against the torch references; run as `triton_cases`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels import attend_to_cells, registry, select_tokens, store_index_keys
from kernels.sparse_attention.base import SparsePiece, SparseQueries
from tests.support.kernels.paged_cases import make_paged

PAGE = 16


def make_queries(device: str, counts: list[list[int]], top_k: int) -> SparseQueries:
    """One chunk of queries per list of positions: one query of each row or, if the positions are
    ascending, the last queries of one row."""
    pieces, positions, start = [], list[int](), 0
    for places in counts:
        length = max(places) + 1
        rows = len(places) if places != sorted(places) else 1
        pages = torch.randperm(rows * -(-length // PAGE)).view(rows, -1).to(device)
        pieces.append(SparsePiece(start, start + len(places), pages, length))
        positions += places
        start += len(places)
    return SparseQueries(
        pieces=tuple(pieces),
        positions=torch.tensor(positions, device=device),
        top_k=top_k,
        page_size=PAGE,
    )


def compare_selections(
    device: str, dtype: torch.dtype, num_heads: int, dim: int, queries: SparseQueries
) -> None:
    """Asserts that both implementations select the same tokens."""
    cache = torch.randn(40, PAGE, 1, dim).to(device, dtype)
    q = torch.randn(len(queries.positions), num_heads, dim).to(device, dtype)
    weights = torch.randn(len(q), num_heads).to(device)
    table = torch.randn(int(queries.positions.max()) + 1, dim // 2 // 2 * 2).to(device)

    def run() -> torch.Tensor:
        return select_tokens(q.clone(), weights, cache, queries, cos_sin_cache=table)

    with registry.using("torch"):
        expected = run()
    with registry.using("triton"):
        assert torch.equal(run(), expected)


def selection_case(device: str, dtype: torch.dtype) -> None:
    """Checks several decodes, and a prompt of several tiles of queries; more and fewer tokens than
    are selected; numbers of heads and dimensions that are not powers of 2."""
    queries = make_queries(device, [[70, 3, 31], list(range(50, 90))], 8)
    compare_selections(device, dtype, 33, 24, queries)
    compare_selections(device, dtype, 16, 32, queries)


def index_keys_case(device: str, dtype: torch.dtype) -> None:
    """Checks keys that are slices of wider rows."""
    drawn = torch.randn(4, 60).to(device, dtype)
    slots, positions = (torch.tensor(n, device=device) for n in ([5, 17, 0, 31], [0, 7, 49, 7]))
    table = torch.randn(50, 12).to(device)

    def run() -> torch.Tensor:
        cache = torch.zeros(4, 8, 1, 40, device=device, dtype=dtype)
        keys = drawn.clone()[:, :40]
        store_index_keys(keys, cache, slots, positions=positions, cos_sin_cache=table)
        return cache

    with registry.using("torch"):
        expected = run()
    with registry.using("triton"):
        tolerance = 2e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(run(), expected, rtol=tolerance, atol=tolerance)


def sparse_attention_case(device: str, dtype: torch.dtype) -> None:
    """Checks one split of the cells, and several splits, some of which are empty for queries with
    few cells; more heads than in a program."""
    for num_queries, top_k, num_heads in ((3, 9, 5), (2, 300, 33)):
        case = make_paged(
            [400], num_kv_heads=1, head_dim=44, value_dim=36, device=device, dtype=dtype
        )
        q = torch.randn(num_queries, num_heads, 44).to(device, dtype)
        cells = torch.stack([torch.randperm(400)[:top_k] for _ in range(num_queries)])
        cells[0, 4:] = -1
        found = {}
        for name in ("torch", "triton"):
            with registry.using(name):
                chosen = cells.int().to(device)
                found[name] = attend_to_cells(q, case.k_cache, chosen, 36, scale=0.2)
        tolerance = 2e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(*found.values(), rtol=tolerance, atol=tolerance)


SPARSE_CASES: list[Callable[[str, torch.dtype], None]] = [
    selection_case,
    index_keys_case,
    sparse_attention_case,
]
