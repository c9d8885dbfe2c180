"""Work that programs skip without effect on results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

from kernels import registry
from kernels.attention import AttentionMetadata, triton_backend, triton_kernel
from kernels.attention.triton_backend import TritonAttention
from kernels.attention.triton_config import extend_blocks
from kernels.fused_moe import ExpertChoice, fused_moe
from tests.support.kernels.experts import make_experts
from tests.support.kernels.paged_cases import Paged, make_paged

HEAD_DIM = 16
KEYS = extend_blocks(HEAD_DIM, torch.float32, 1, 1.0).keys
"""Of a block, of decodes as well."""


@contextmanager
def noting_walks() -> Iterator[list[tuple[int, bool]]]:
    """Collects the keys of each loop, and whether they are masked."""
    found: list[tuple[int, bool]] = []
    walk = triton_kernel._walk

    def noted(start: Any, stop: Any, end: Any, masked: Any, *rest: Any) -> Any:
        keys = int((stop - start).handle.data.item())
        found.append((keys, bool(getattr(masked, "value", masked))))
        return walk(start, stop, end, masked, *rest)

    with registry.using("triton"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_kernel, "_walk", noted)
        yield found


def of_one_head(length: int) -> tuple[Paged, torch.Tensor]:
    case = make_paged([length], num_kv_heads=1, head_dim=HEAD_DIM)
    return case, torch.randn(length, 1, HEAD_DIM)


def test_keys_are_masked_where_some_query_does_not_see_them() -> None:
    """Only keys on the diagonal of a prompt and past the end of a decode's row."""
    length, queries = 8 * KEYS, extend_blocks(HEAD_DIM, torch.float32, 1, 8.0 * KEYS).rows
    case, q = of_one_head(length)
    for rest in (0, 3):
        row = Paged([length - rest], case.k_cache, case.v_cache, case.page_table, case.scale)
        with noting_walks() as walks:
            row.decode(q[:1])
        assert sum(keys for keys, is_masked in walks if is_masked) < KEYS + rest
        assert sum(keys for keys, is_masked in walks if not is_masked) >= length - KEYS
    with noting_walks() as walks:
        case.extend(q, [length])
    masked = [keys for keys, is_masked in walks if is_masked and keys > 0]
    assert 0 < len(masked) <= -(-length // queries)
    assert max(masked) <= queries + KEYS
    assert sum(keys for keys, is_masked in walks if not is_masked) > 3 * sum(masked)


def test_heads_that_share_a_kv_head_walk_its_keys_together() -> None:
    for queries in (1, 4):
        totals = []
        for num_heads in (1, 4):
            case = make_paged([300], num_kv_heads=1, head_dim=HEAD_DIM)
            with noting_walks() as walks:
                case.extend(torch.randn(queries, num_heads, HEAD_DIM), [queries])
            totals.append(sum(keys for keys, _ in walks))
        assert totals[0] == totals[1] >= 300


def test_long_rows_in_batch_invariant_mode_are_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 rows of 128k; with a split per 256 keys there would be some thirty launches."""
    # Nothing is launched: it takes the interpreter six seconds to make the schedule of so many.
    monkeypatch.setattr(triton_backend, "make_schedule", lambda rows, **_: rows)
    length, count = 128 << 10, 256
    metadata = AttentionMetadata(
        page_table=torch.zeros(count, 1, dtype=torch.int32),
        seq_lens=torch.full((count,), length, dtype=torch.int32),
        seq_lens_host=[length] * count,
        page_size=length,
    )
    q = torch.empty(count, 32, 128, dtype=torch.bfloat16, device="meta")
    with registry.using("triton"):
        pieces = TritonAttention(batch_invariant=True).plan(metadata)._schedules(q, 8)
    assert len(pieces) == 1


def test_what_one_program_attends_to_needs_no_partial_outputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    merged: list[int] = []
    merge = triton_kernel._merge

    def noted(*args: Any) -> Any:
        merged.append(1)
        return merge(*args)

    monkeypatch.setattr(triton_kernel, "_merge", noted)
    for length, has_splits in ((40, False), (900, True)):
        case, q = of_one_head(length)
        merged.clear()
        with registry.using("triton"):
            case.decode(q[:1])
        assert bool(merged) == has_splits


def test_tiles_of_no_expert_multiply_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are tiles for any choice of experts: here six, and one expert is selected."""
    num_products = 0
    create_dot = InterpreterBuilder.create_dot

    def counted(builder: InterpreterBuilder, *args: Any) -> Any:
        nonlocal num_products
        num_products += 1
        return create_dot(builder, *args)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", counted)
    experts, x = make_experts(9, hidden=32, inner=32), torch.randn(6, 32)
    weights = torch.ones(6, 1)
    found = []
    for expert_ids in (torch.arange(6), torch.full((6,), 4)):
        num_products = 0
        with registry.using("triton"):
            fused_moe(x, experts, ExpertChoice(expert_ids.view(-1, 1), weights))
        found.append(num_products)
    assert found[0] == 6 * found[1]
