from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.attention import AttentionMetadata, torch_plan
from kernels.attention.torch_backend import TorchAttention
from tests.support.kernels.paged_cases import (
    Paged,
    make_paged,
    naive_bidirectional,
    naive_decode,
    naive_extend,
)

SHAPES = [(8, 4, 32), (12, 4, 64), (4, 1, 40), (3, 3, 16)]


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["fast", "invariant"])
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), SHAPES)
@pytest.mark.parametrize("lens", [[64, 64, 64], [5, 200, 33, 1, 128], [900, 1, 2, 300, 17]])
def test_decode_matches_naive(
    lens: list[int], q_heads: int, kv_heads: int, head_dim: int, batch_invariant: bool
) -> None:
    case = make_paged(lens, num_kv_heads=kv_heads, head_dim=head_dim)
    q = torch.randn(len(lens), q_heads, head_dim)
    out = case.decode(q, batch_invariant=batch_invariant)
    torch.testing.assert_close(out.double(), naive_decode(case, q), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 2])
def test_decode_with_one_thread_and_several(threads: int) -> None:
    torch.set_num_threads(threads)
    case = make_paged([40, 33, 17], num_kv_heads=2, head_dim=32)
    q = torch.randn(3, 6, 32)
    torch.testing.assert_close(case.decode(q).double(), naive_decode(case, q), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["fast", "invariant"])
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), SHAPES)
@pytest.mark.parametrize(
    ("lens", "query_lens"),
    [([64], [64]), ([200], [7]), ([5, 200, 33, 40], [5, 64, 1, 20]), ([300, 17], [140, 17])],
)
def test_extend_matches_naive(
    lens: list[int],
    query_lens: list[int],
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    batch_invariant: bool,
) -> None:
    case = make_paged(lens, num_kv_heads=kv_heads, head_dim=head_dim)
    q = torch.randn(sum(query_lens), q_heads, head_dim)
    out = case.extend(q, query_lens, batch_invariant=batch_invariant)
    expected = naive_extend(case, q, query_lens)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("heads", "head_dim", "value_dim"), [(8, 40, 32), (3, 20, 12)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("lens", "query_lens"),
    [([64], [64]), ([5, 200, 33, 40], [5, 64, 1, 20]), ([900, 1, 2, 300], [140, 1, 1, 17])],
)
def test_latents_match_naive(
    lens: list[int],
    query_lens: list[int],
    heads: int,
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
) -> None:
    case = make_paged(lens, num_kv_heads=1, head_dim=head_dim, value_dim=value_dim, dtype=dtype)
    q = torch.randn(sum(query_lens), heads, head_dim).to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for found, expected in (
        (case.extend(q, query_lens), naive_extend(case, q, query_lens)),
        (case.decode(q[: len(lens)]), naive_decode(case, q[: len(lens)])),
    ):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["fast", "invariant"])
@pytest.mark.parametrize(("kv_heads", "has_sinks"), [(1, False), (2, True), (4, False)])
def test_values_narrower_than_keys_match_naive(
    kv_heads: int, has_sinks: bool, batch_invariant: bool
) -> None:
    query_lens = [5, 64, 1, 20]
    case = make_paged([5, 200, 33, 40], num_kv_heads=kv_heads, head_dim=40, own_value_dim=24)
    case.sinks = torch.randn(4) if has_sinks else None
    q = torch.randn(sum(query_lens), 4, 40)
    for found, expected in (
        (case.extend(q, query_lens, batch_invariant=batch_invariant), (q, query_lens)),
        (case.decode(q[:4], batch_invariant=batch_invariant), (q[:4], [1] * 4)),
    ):
        assert found.shape[2] == 24
        expected = naive_extend(case, *expected)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["fast", "invariant"])
@pytest.mark.parametrize(
    ("block_size", "lens", "query_lens"),
    [
        (2, [20, 6], [20, 2]),
        (4, [64, 12, 200], [4, 12, 72]),
        (32, [96, 32, 320], [32, 32, 160]),
        (256, [512, 1024], [256, 768]),
    ],
)
def test_blocks_see_all_of_themselves(
    block_size: int, lens: list[int], query_lens: list[int], batch_invariant: bool
) -> None:
    case = make_paged(lens, num_kv_heads=2, head_dim=32)
    q = torch.randn(sum(query_lens), 4, 32)
    out = case.extend(q, query_lens, batch_invariant=batch_invariant, block_size=block_size)
    expected = naive_extend(case, q, query_lens, block_size)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["fast", "invariant"])
@pytest.mark.parametrize("window", [0, 9, 75])
def test_bidirectional_rows(window: int, batch_invariant: bool) -> None:
    lens, query_lens = [20, 6, 150], [8, 6, 70]
    case = make_paged(lens, num_kv_heads=2, head_dim=16)
    q = torch.randn(sum(query_lens), 4, 16)
    options = {"batch_invariant": batch_invariant, "is_bidirectional": True}
    out = case.extend(q, query_lens, window=window, **options)
    expected = naive_bidirectional(case, q, query_lens, window)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_rows_of_blocks_are_whole_blocks() -> None:
    case = make_paged([12], num_kv_heads=1, head_dim=16)
    with pytest.raises(AssertionError, match="whole blocks of 8"):
        case.extend(torch.randn(8, 1, 16), [8], block_size=8)


def test_bits_of_a_block_do_not_depend_on_chunks_or_other_rows() -> None:
    case = make_paged([160, 48], num_kv_heads=2, head_dim=32)
    q = torch.randn(208, 4, 32)
    together = case.extend(q, [160, 48], batch_invariant=True, block_size=8)
    for start, stop in ((0, 64), (64, 72), (72, 160)):
        part = Paged([stop], case.k_cache, case.v_cache, case.page_table[:1], case.scale)
        alone = part.extend(q[start:stop], [stop - start], batch_invariant=True, block_size=8)
        assert torch.equal(alone, together[start:stop])


def test_long_extend_is_cut_into_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_plan, "_MAX_MASK_ELEMENTS", 500)
    case = make_paged([100], num_kv_heads=2, head_dim=16)
    q = torch.randn(60, 4, 16)
    out = case.extend(q, [60])
    torch.testing.assert_close(out.double(), naive_extend(case, q, [60]), rtol=1e-5, atol=1e-5)
    # Five queries a piece: blocks are cut too.
    out = case.extend(q, [60], block_size=4)
    expected = naive_extend(case, q, [60], block_size=4)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("page_size", [1, 64, 256])
@pytest.mark.parametrize("batch_invariant", [False, True], ids=["fast", "invariant"])
def test_other_page_sizes(page_size: int, batch_invariant: bool) -> None:
    case = make_paged([70, 300], num_kv_heads=2, head_dim=16, page_size=page_size)
    q = torch.randn(2, 4, 16)
    out = case.decode(q, batch_invariant=batch_invariant)
    torch.testing.assert_close(out.double(), naive_decode(case, q), rtol=1e-5, atol=1e-5)


def test_queries_may_be_slices_of_a_fused_projection() -> None:
    case = make_paged([20, 30], num_kv_heads=2, head_dim=16)
    fused = torch.randn(2, (4 + 2 + 2) * 16)
    q = fused[:, :64].view(2, 4, 16)
    for invariant in (False, True):
        out = case.decode(q, batch_invariant=invariant)
        torch.testing.assert_close(out.double(), naive_decode(case, q), rtol=1e-5, atol=1e-5)
        out = case.extend(q, [1, 1], batch_invariant=invariant)
        torch.testing.assert_close(out.double(), naive_decode(case, q), rtol=1e-5, atol=1e-5)


def test_padding_rows_stay_finite() -> None:
    case = make_paged([0, 9], num_kv_heads=2, head_dim=16)
    for invariant in (False, True):
        assert case.decode(torch.randn(2, 4, 16), batch_invariant=invariant).isfinite().all()


def test_rows_of_like_length_share_a_group() -> None:
    case = make_paged([1600, 10, 12, 1500, 14], num_kv_heads=1, head_dim=16)
    groups = torch_plan.plan_decode_groups(case.decodes())
    assert [group.num_rows for group in groups] == [2, 3]


def test_empty_batches() -> None:
    table, lens = torch.zeros(0, 4, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    starts = torch.zeros(1, dtype=torch.int32)
    for query_start in (None, starts):
        metadata = AttentionMetadata(
            page_table=table,
            seq_lens=lens,
            seq_lens_host=[],
            query_start=query_start,
            page_size=16,
        )
        q, cache = torch.zeros(0, 4, 16), torch.zeros(1, 16, 2, 16)
        step = TorchAttention().plan(metadata)
        assert step.forward(q, cache, cache, scale=1.0).shape == (0, 4, 16)


def _shared_row_decode(
    case: Paged, q: torch.Tensor, picked: list[int], window: int = 0
) -> torch.Tensor:
    rows = case.page_table.repeat(len(picked), 1)
    lens = [index + 1 for index in picked]
    return Paged(lens, case.k_cache, case.v_cache, rows, case.scale).decode(
        q[picked], batch_invariant=True, window=window
    )


def _chunks(case: Paged, q: torch.Tensor, step: int, window: int = 0) -> torch.Tensor:
    length, parts = case.lens[0], []
    for start in range(0, length, step):
        stop = min(start + step, length)
        part = Paged([stop], case.k_cache, case.v_cache, case.page_table, case.scale)
        own = [stop - start]
        parts.append(part.extend(q[start:stop], own, batch_invariant=True, window=window))
    return torch.cat(parts)


INVARIANT_SHAPES = [*SHAPES, (3, 1, 64), (1, 1, 64), (6, 1, 128), (2, 2, 64)]


@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim", "threads"),
    [
        *((*shape, 1) for shape in INVARIANT_SHAPES),
        (*SHAPES[0], 2),
        *(pytest.param(*shape, 2, marks=pytest.mark.long) for shape in INVARIANT_SHAPES[1:]),
    ],
)
def test_invariant_bits_do_not_depend_on_chunks_or_batch(
    q_heads: int, kv_heads: int, head_dim: int, threads: int
) -> None:
    length = 300
    case = make_paged([length], num_kv_heads=kv_heads, head_dim=head_dim)
    q = torch.randn(length, q_heads, head_dim)
    expected = case.extend(q, [length], batch_invariant=True)
    torch.set_num_threads(threads)
    assert torch.equal(_chunks(case, q, 32), expected)
    assert torch.equal(_chunks(case, q, 97), expected)
    singles = [0, 1, 63, 127, 128, 200, 255, 256, 299]
    for index in singles:
        assert torch.equal(_shared_row_decode(case, q, [index]), expected[index : index + 1])
    shuffled = torch.randperm(length).tolist()
    assert torch.equal(_shared_row_decode(case, q, shuffled), expected[shuffled])


def test_invariant_bits_do_not_depend_on_other_rows_or_placement() -> None:
    case = make_paged([150, 40, 290], num_kv_heads=2, head_dim=32)
    query_lens = [60, 40, 100]
    q = torch.randn(200, 4, 32)
    together = case.extend(q, query_lens, batch_invariant=True)
    moved_pages = torch.randperm(case.k_cache.shape[0])
    moved = Paged(
        [290],
        case.k_cache[moved_pages],
        case.v_cache[moved_pages],
        moved_pages.argsort()[case.page_table[2:3].long()].int(),
        case.scale,
    )
    alone = moved.extend(q[100:], [100], batch_invariant=True)
    assert torch.equal(alone, together[100:])


WINDOWS = [1, 16, 33, 128, 1000]


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["fast", "invariant"])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("lens", [[64, 64, 64], [5, 200, 33, 1, 128], [400, 1, 2, 300, 17]])
def test_decode_within_a_window(lens: list[int], window: int, batch_invariant: bool) -> None:
    case = make_paged(lens, num_kv_heads=2, head_dim=32)
    q = torch.randn(len(lens), 4, 32)
    expected = naive_decode(case, q, window)
    if not batch_invariant:
        forget_before(case, [length - window for length in lens])
    out = case.decode(q, batch_invariant=batch_invariant, window=window)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["fast", "invariant"])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(
    ("lens", "query_lens"),
    [([64], [64]), ([200], [7]), ([5, 200, 33, 40], [5, 64, 1, 20]), ([300, 17], [240, 17])],
)
def test_extend_within_a_window(
    lens: list[int], query_lens: list[int], window: int, batch_invariant: bool
) -> None:
    case = make_paged(lens, num_kv_heads=2, head_dim=32)
    q = torch.randn(sum(query_lens), 4, 32)
    expected = naive_extend(case, q, query_lens, window=window)
    if not batch_invariant:
        forget_before(case, [n - own + 1 - window for n, own in zip(lens, query_lens, strict=True)])
    out = case.extend(q, query_lens, batch_invariant=batch_invariant, window=window)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["fast", "invariant"])
@pytest.mark.parametrize("size", [1, 16, 33, 128, 1000])
@pytest.mark.parametrize(
    ("lens", "query_lens"),
    [([64], [64]), ([5, 200, 33, 40], [5, 64, 1, 20]), ([300, 17], [240, 17])],
)
def test_rows_within_their_chunks(
    lens: list[int], query_lens: list[int], size: int, batch_invariant: bool
) -> None:
    case = make_paged(lens, num_kv_heads=2, head_dim=32)
    q = torch.randn(sum(query_lens), 4, 32)
    expected = naive_extend(case, q, query_lens, window=size, is_chunked=True)
    decoded = naive_decode(case, q[: len(lens)], size, is_chunked=True)
    options: dict[str, Any] = {"window": size, "is_chunked": True}
    options["batch_invariant"] = batch_invariant
    if not batch_invariant:
        first = [n - own for n, own in zip(lens, query_lens, strict=True)]
        forget_before(case, [position // size * size for position in first])
    for out, own in (
        (case.extend(q, query_lens, **options), expected),
        (case.decode(q[: len(lens)], **options), decoded),
    ):
        torch.testing.assert_close(out.double(), own, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [0, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_capped_scores(window: int, dtype: torch.dtype) -> None:
    lens, query_lens = [5, 200, 33, 40], [5, 64, 1, 20]
    case = make_paged(lens, num_kv_heads=2, head_dim=32, cap=0.7, dtype=dtype)
    q = torch.randn(sum(query_lens), 4, 32).to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for out, expected in (
        (
            case.extend(q, query_lens, window=window),
            naive_extend(case, q, query_lens, window=window),
        ),
        (case.decode(q[:4], window=window), naive_decode(case, q[:4], window)),
    ):
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["fast", "invariant"])
@pytest.mark.parametrize("window", [0, 33])
def test_sinks(window: int, batch_invariant: bool) -> None:
    lens, query_lens = [5, 200, 33, 40], [5, 64, 1, 20]
    case = make_paged(lens, num_kv_heads=2, head_dim=32)
    case.sinks = torch.tensor([-2.0, 0.0, 1.5, 4.0])
    q = torch.randn(sum(query_lens), 4, 32)
    options: dict[str, Any] = {"window": window, "batch_invariant": batch_invariant}
    for out, expected in (
        (case.extend(q, query_lens, **options), naive_extend(case, q, query_lens, window=window)),
        (case.decode(q[:4], **options), naive_decode(case, q[:4], window)),
    ):
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_long_extend_within_a_window_is_cut_into_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_plan, "_MAX_MASK_ELEMENTS", 500)
    case = make_paged([100], num_kv_heads=2, head_dim=16)
    q = torch.randn(60, 4, 16)
    out = case.extend(q, [60], window=20)
    expected = naive_extend(case, q, [60], window=20)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [1, 100, 128])
def test_invariant_bits_within_a_window(window: int) -> None:
    length = 300
    case = make_paged([length], num_kv_heads=2, head_dim=32)
    q = torch.randn(length, 4, 32)
    expected = case.extend(q, [length], batch_invariant=True, window=window)
    for step in (32, 97):
        assert torch.equal(_chunks(case, q, step, window), expected)
    picked = torch.randperm(length).tolist()
    assert torch.equal(_shared_row_decode(case, q, picked, window), expected[picked])
    assert torch.equal(_shared_row_decode(case, q, [211], window), expected[211:212])


def forget_before(case: Paged, positions: list[int]) -> None:
    """Fills pages before a row's position with NaN: they must not be read."""
    for row, position in enumerate(positions):
        pages = case.page_table[row, : max(0, position) // case.page_size].long()
        case.k_cache[pages] = float("nan")
        case.v_cache[pages] = float("nan")
