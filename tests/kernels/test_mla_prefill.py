"""MLA prompts in expanded form on torch, and the rows for which it is chosen."""

from __future__ import annotations

import pytest
import torch

from kernels import Expansion
from kernels.mla_prefill import plan_expanded_rows
from kernels.mla_prefill.base import MIN_QUERIES
from tests.support.kernels.mla_cases import compare_prompts, make_prompts

DEEPSEEK = Expansion(16, 512, 64, 128, 128, itemsize=2)


@pytest.mark.parametrize("most_keys", [1000, 170, 64, 7])
def test_any_pieces_of_keys_give_the_attention_of_the_latent_space(most_keys: int) -> None:
    prompts = make_prompts([90, 30, 170, 8, 40], [90, 17, 60, 8, 1])
    compare_prompts(prompts, most_keys, "torch")


def test_an_fp8_cache_is_expanded_with_its_scale() -> None:
    compare_prompts(make_prompts([90, 41], [50, 41], fp8_scale=0.5), 64, "torch")


@pytest.mark.parametrize("most_keys", [300, 100, 33])
def test_pieces_hold_all_keys_once_and_no_more_than_allowed(most_keys: int) -> None:
    lens = [90, 30, 250, 1, 99, 100]
    case = make_prompts(lens, [1] * len(lens)).case
    rows = plan_expanded_rows(case.extends([1] * len(lens)), most_keys)
    found = torch.cat([piece.cells for piece in rows.pieces])
    cells = torch.arange(len(case.k_cache) * case.page_size).view(len(case.k_cache), -1)
    expected = [case.row(cells, row) for row in range(len(lens))]
    assert torch.equal(found, torch.cat(expected))
    assert all(len(piece.cells) <= most_keys for piece in rows.pieces)
    assert rows.has_parts == (most_keys < max(lens))


def operations(queries: int, keys: int, *, is_expanded: bool) -> int:
    """Products of a head, counted one by one."""
    prefix, total = keys - queries, 0
    for query in range(queries):
        pairs = prefix + query + 1
        total += pairs * ((64 + 128 + 128) if is_expanded else (64 + 512 + 512))
        total += 0 if is_expanded else 512 * (128 + 128)
    return total + (keys * 512 * (128 + 128) if is_expanded else 0)


@pytest.mark.parametrize("prefix", [0, 1, 100, 1000, 20_000])
def test_rows_are_expanded_if_that_takes_fewer_operations(prefix: int) -> None:
    for queries in (1, 64, MIN_QUERIES - 1, MIN_QUERIES, 165, 170, 171, 172, 500, 3000):
        counts = [operations(queries, prefix + queries, is_expanded=one) for one in (True, False)]
        expected = queries >= MIN_QUERIES and counts[0] < counts[1]
        assert DEEPSEEK.saves_work(queries, prefix + queries) == expected, queries


def test_the_memory_of_a_piece_is_bounded() -> None:
    assert DEEPSEEK.most_keys == 16_384
    assert DEEPSEEK._replace(num_heads=128).most_keys == 2_048
    assert DEEPSEEK.most_keys * DEEPSEEK.width * 2 == 128 << 20
