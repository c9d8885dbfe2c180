"""Selective scans and short convolutions: all ways to divide rows into steps agree."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from kernels.selective_scan.reference import ScanInputs, scan_chunks, scan_steps
from tests.support.kernels.delta_cases import Row, make_rows
from tests.support.kernels.scan_cases import make_scan_step

HEADS, STATE, WIDTH = 3, 8, 16


def draw(count: int) -> tuple[ScanInputs, torch.Tensor]:
    torch.manual_seed(count)
    inputs = ScanInputs(
        torch.randn(count, HEADS, WIDTH),
        torch.randn(count, HEADS, STATE),
        torch.randn(count, HEADS, STATE),
        -torch.rand(count, HEADS),
    )
    return inputs, torch.randn(HEADS, STATE, WIDTH)


@pytest.mark.parametrize("count", [1, 63, 64, 150])
def test_products_advance_as_single_positions_do(count: int) -> None:
    inputs, state = draw(count)
    expected = scan_chunks(inputs, state, by_position=True)
    torch.testing.assert_close(scan_chunks(inputs, state), expected, rtol=1e-4, atol=1e-4)


def test_rows_together_have_the_bits_of_rows_alone() -> None:
    inputs, _ = draw(5)
    states = torch.randn(5, HEADS, STATE, WIDTH)
    together = scan_steps(inputs, states)
    for row in range(5):
        alone = scan_steps(inputs.part(slice(row, row + 1)), states[row : row + 1])
        assert all(torch.equal(a[row : row + 1], b) for a, b in zip(together, alone, strict=True))


def test_parts_and_snapshots_have_the_bits_of_the_whole() -> None:
    torch.manual_seed(1)
    step = make_scan_step(150, "cpu", torch.float32)
    whole = make_rows([Row(0, 0, 150, ((70, 9),))])
    expected, windows, states = step.run(whole, by_position=True)
    outputs, cuts = [], (0, 1, 70, 150)
    for start, end in pairwise(cuts):
        rows = make_rows([Row(0, start, end - start)])
        out, *kept = step.run(rows, by_position=True, tokens=slice(start, end))
        step = step._replace(windows=kept[0], states=kept[1])
        outputs.append(out)
        if end == 70:
            assert torch.equal(kept[0][0], windows[9])
            assert torch.equal(kept[1][0], states[9])
    assert torch.equal(torch.cat(outputs), expected)
    assert torch.equal(step.windows[0], windows[0])
    assert torch.equal(step.states[0], states[0])
