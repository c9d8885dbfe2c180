"""Drafts of the compiled library: equal to sampling step by step, and their end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from kernels.native import DraftTables, NativeDrafter, NativeDrafts, sample_native
from kernels.sample_tokens.base import SamplingParameters
from tests.support.kernels.native_model import VOCAB, Bench, make_model

BOUNDS = np.array([0.5, 0.1, 0.0], dtype=np.float32)
ROWS = np.array([(2, 10, 3, 6), (1, 0, 40, 2), (0, 7, 1, 5)], dtype=np.int64)
TEMPERATURES = np.array([0.0, 12.0, 25.0], dtype=np.float32)
SEEDS = np.array([3, 4, -5], dtype=np.int64)
TOP_K = np.array([0, 0, 30], dtype=np.int64)
TOP_P = np.array([1.0, 0.9, 1.0], dtype=np.float32)


def ready(dtype: torch.dtype) -> Bench:
    torch.manual_seed(2)
    bench = Bench(make_model(dtype))
    bench.run((0, 0, 7), (2, 0, 10))
    return bench


def draft(
    bench: Bench, shares: list[float], threshold: float, ends: Sequence[int] = (-1, -1, -1)
) -> NativeDrafts:
    tables = DraftTables(
        token_pool=bench.tokens,
        page_table=bench.pages,
        temperature=TEMPERATURES,
        top_p=TOP_P,
        log_min_p=np.full(3, -np.inf, dtype=np.float32),
        top_k=TOP_K,
        seeds=SEEDS,
        end_tokens=np.array([(-1, end) for end in ends]),
        shares=np.tile(np.array(shares, dtype=np.float32), (3, 1)),
        bounds=BOUNDS,
    )
    return NativeDrafter(bench.decoder, tables, 6).draft(ROWS, threshold)


def step_by_step(bench: Bench) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens and levels of each row alone, step by step."""
    tokens: list[list[int]] = []
    levels: list[list[int]] = []
    for slot, start, length, most in ROWS.tolist():
        tokens.append([])
        levels.append([])
        for _ in range(most):
            hidden = bench.run((slot, start, length))[-1:]
            logits = bench.decoder.logits(hidden)
            temperature = float(TEMPERATURES[slot])
            random = SamplingParameters(
                temperature=torch.tensor([temperature]),
                seeds=torch.tensor([int(SEEDS[slot])]),
                positions=torch.tensor([start + length]),
                top_k=torch.tensor([int(TOP_K[slot])]),
                top_p=torch.tensor([float(TOP_P[slot])]),
                log_min_p=None,
            )
            token = int(sample_native(logits, random if temperature else None))
            probability = (logits[0] / (temperature or 1.0)).softmax(dim=-1)[token]
            levels[-1].append(int((probability < torch.from_numpy(BOUNDS)).sum()))
            tokens[-1].append(token)
            bench.tokens[slot, start + length] = token
            start, length = start + length, 1
    return tokens, levels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_drafts_are_what_steps_draw(dtype: torch.dtype) -> None:
    expected = ready(dtype)
    tokens, levels = step_by_step(expected)
    bench = ready(dtype)
    drafts = draft(bench, [0.9, 0.9, 0.9], 0.0)
    assert drafts.drafted == [6, 2, 5]
    assert drafts.tokens == tokens
    assert drafts.levels == levels
    assert len({level for row in levels for level in row}) > 1, "all guesses are equally certain"
    assert torch.equal(bench.tokens, expected.tokens), "drafts go into the pool"
    assert max(max(row) for row in tokens) < VOCAB


def test_drafts_end_before_the_first_that_is_too_unlikely_to_count() -> None:
    tokens, levels = step_by_step(ready(torch.float32))
    shares, threshold = [0.9, 0.7, 0.2], 0.4
    bench = ready(torch.float32)
    drafts = draft(bench, shares, threshold)
    cut = False
    for place, row in enumerate(levels):
        reach = np.cumprod([shares[level] for level in row])
        number = int((reach >= threshold).sum())
        assert drafts.drafted[place] == number
        assert len(drafts.tokens[place]) == min(number + 1, len(row))
        assert drafts.tokens[place][:number] == tokens[place][:number]
        cut |= number < len(row)
    assert cut


def test_drafts_end_with_a_token_that_ends_their_request() -> None:
    tokens, _ = step_by_step(ready(torch.float32))
    ends = [tokens[place][2] if len(tokens[place]) > 2 else -1 for place in (2, 1, 0)]  # by slot
    drafts = draft(ready(torch.float32), [0.9, 0.9, 0.9], 0.0, ends)
    expected = [row[: row.index(row[2]) + 1] if len(row) > 2 else row for row in tokens]
    assert drafts.tokens == expected
    assert drafts.drafted == [len(row) for row in expected] != [len(row) for row in tokens]
