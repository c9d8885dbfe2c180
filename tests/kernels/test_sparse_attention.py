"""Sparse attention: which queries select tokens, which tokens they select, and attention over
these, against attention over all tokens with a mask."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels import attend_to_cells, select_tokens, store_index_keys
from kernels.attention import AttentionMetadata
from kernels.sparse_attention.base import SparsePiece, SparseQueries
from kernels.sparse_attention.plan import SplitRows, split_rows

PAGE, TOP_K, HEADS, DIM, ROTARY = 4, 6, 16, 16, 8
DECODES, EXTENDS = [5, 6, 7, 30], [(4, 4), (3, 9), (8, 8), (5, 21), (1, 40)]
"""Lengths of rows of one token; queries and lengths of longer rows."""


def make_parts() -> tuple[AttentionMetadata, AttentionMetadata]:
    lengths = [*DECODES, *(length for _, length in EXTENDS)]
    columns = -(-max(lengths) // PAGE)
    pages = torch.randperm(len(lengths) * columns, dtype=torch.int32).view(-1, columns)
    decode = AttentionMetadata(
        page_table=pages[: len(DECODES)],
        seq_lens=torch.tensor(DECODES, dtype=torch.int32),
        seq_lens_host=DECODES,
        page_size=PAGE,
    )
    query_lens = [count for count, _ in EXTENDS]
    extend = replace(
        decode,
        page_table=pages[len(DECODES) :],
        seq_lens=torch.tensor([length for _, length in EXTENDS], dtype=torch.int32),
        seq_lens_host=[length for _, length in EXTENDS],
        query_start=torch.tensor([0, *query_lens]).cumsum(0).int(),
        query_lens_host=query_lens,
    )
    return decode, extend


def make_positions() -> torch.Tensor:
    rows = [(1, length) for length in DECODES] + EXTENDS
    return torch.tensor([place for n, length in rows for place in range(length - n, length)])


def make_split() -> tuple[SplitRows, torch.Tensor]:
    torch.manual_seed(4)
    decode, extend = make_parts()
    split = split_rows(decode, extend, make_positions(), TOP_K)
    assert split is not None
    return split, torch.cat((decode.page_table, extend.page_table))


def test_queries_with_few_tokens_attend_to_all() -> None:
    split, _ = make_split()
    positions = make_positions()
    assert split.tokens is not None
    assert split.others is not None
    assert split.tokens.tolist() == [t for t, place in enumerate(positions) if place >= TOP_K]
    assert split.others.tolist() == [t for t, place in enumerate(positions) if place < TOP_K]
    assert split.queries.positions.tolist() == positions[split.tokens].tolist()
    assert split.decode is not None
    assert split.extend is not None
    assert split.decode.seq_lens.tolist() == list(split.decode.seq_lens_host) == [5, 6]
    assert split.extend.seq_lens.tolist() == list(split.extend.seq_lens_host) == [4, 6]
    assert list(split.extend.query_lens_host) == [4, 6]


def test_rows_below_the_selections_size_are_not_split() -> None:
    decode, extend = make_parts()
    assert split_rows(decode, extend, make_positions(), 40) is None
    all_selecting = split_rows(replace(decode), None, torch.tensor([4, 5, 6, 29]), 4)
    assert all_selecting is not None
    assert all_selecting.tokens is all_selecting.others is all_selecting.decode is None


def row_and_place(token: int) -> tuple[int, int]:
    """Row of a token, and its position."""
    counts = [1] * len(DECODES) + [count for count, _ in EXTENDS]
    rows = [row for row, count in enumerate(counts) for _ in range(count)]
    return rows[token], int(make_positions()[token])


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("max_pairs", [1 << 22, 45])
def test_tokens_with_the_highest_scores_are_selected(
    batch_invariant: bool, max_pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by scores of all tokens; in one piece per row, and in several."""
    monkeypatch.setattr("kernels.sparse_attention.plan._MAX_PAIRS", max_pairs)
    split, pages = make_split()
    tokens = split.tokens
    assert tokens is not None
    keys = torch.randn(pages.numel(), PAGE, 1, DIM)
    q, weights = torch.randn(len(tokens), HEADS, DIM), torch.randn(len(tokens), HEADS)
    table = torch.cat((torch.ones(40, ROTARY // 2), torch.zeros(40, ROTARY // 2)), 1)
    cells = select_tokens(
        q, weights, keys, split.queries, cos_sin_cache=table, batch_invariant=batch_invariant
    )
    for query, token in enumerate(tokens.tolist()):
        row, place = row_and_place(token)
        own = torch.arange(place + 1)
        cells_of_row = pages[row, own // PAGE] * PAGE + own % PAGE
        scores = (keys.view(-1, DIM)[cells_of_row] @ q[query].T).relu() @ weights[query]
        expected = scores.topk(TOP_K).indices.sort().values
        assert cells[query].tolist() == cells_of_row[expected].tolist()


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_of_equal_scores_the_first_are_selected(batch_invariant: bool) -> None:
    """Those with fewer tokens than the selection select all, then none."""
    pages = torch.tensor([[3, 1, 0]])
    queries = SparseQueries(
        pieces=(SparsePiece(0, 3, pages, 12),),
        positions=torch.tensor([2, 8, 11]),
        top_k=5,
        page_size=PAGE,
    )
    keys = torch.zeros(4, PAGE, 1, DIM)
    keys[1, 2] = keys[0, 3] = 1.0
    q, weights = torch.ones(3, HEADS, DIM), torch.ones(3, HEADS)
    table = torch.cat((torch.ones(12, ROTARY // 2), torch.zeros(12, ROTARY // 2)), 1)
    cells = select_tokens(
        q, weights, keys, queries, cos_sin_cache=table, batch_invariant=batch_invariant
    )
    assert cells.tolist() == [[12, 13, 14, -1, -1], [12, 13, 14, 15, 6], [12, 13, 14, 6, 3]]


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_attention_is_that_over_the_selected_tokens(batch_invariant: bool) -> None:
    cache = torch.randn(5, PAGE, 1, 28)
    q = torch.randn(3, HEADS, 28)
    cells = torch.tensor([[1, 7, 12, 18], [0, 3, -1, -1], [19, 5, 6, -1]], dtype=torch.int32)
    found = attend_to_cells(
        q, cache, cells, 20, scale=0.3, value_scale=1.5, batch_invariant=batch_invariant
    )
    for query, row in enumerate(cells.tolist()):
        keys = cache.view(-1, 28)[[cell for cell in row if cell >= 0]]
        expected = (0.3 * q[query] @ keys.T).softmax(-1) @ keys[:, :20] * 1.5
        torch.testing.assert_close(found[query], expected, rtol=1e-5, atol=1e-5)


def test_keys_are_rotated_by_their_positions() -> None:
    keys, cache = torch.randn(2, DIM), torch.zeros(3, PAGE, 1, DIM)
    before = keys.clone()
    angles = torch.rand(9, ROTARY // 2)
    table = torch.cat((angles.cos(), angles.sin()), 1)
    store_index_keys(
        *(keys, cache, torch.tensor([5, 0])), positions=torch.tensor([8, 2]), cos_sin_cache=table
    )
    pairs = torch.complex(before[:, :4], before[:, 4:8]) * torch.exp(1j * angles[[8, 2]])
    rotated = torch.cat((pairs.real, pairs.imag, before[:, 8:]), 1)
    torch.testing.assert_close(cache.view(-1, DIM)[[5, 0]], rotated)
    assert not cache.view(-1, DIM)[1:5].any()
