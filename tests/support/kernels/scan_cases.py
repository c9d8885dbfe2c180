"""Steps of short convolutions and selective scans, and their Triton kernels against the torch
references."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels import ScanLayer, registry, selective_scan, short_convolution
from kernels.states import StateRows
from tests.support.kernels.delta_cases import (
    ROWS,
    SHORT_ROWS,
    WITH_DRAFTS,
    Row,
    make_rows,
    to_device,
)


class ScanStep(NamedTuple):
    """Inputs of a step."""

    x: torch.Tensor
    """Inputs of the convolution, whose outputs are the inputs of the scan."""
    steps: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    layer: ScanLayer
    windows: torch.Tensor
    states: torch.Tensor

    def run(
        self, rows: StateRows, *, by_position: bool = False, tokens: slice = slice(None)
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Runs some tokens of the step on copies of the states; returns the outputs, and the
        convolution windows and states after the step."""
        windows, states = self.windows.clone(), self.states.clone()
        convolved = short_convolution(
            *(self.x[tokens], self.weight, self.bias, windows, rows), has_silu=True
        )
        out = selective_scan(
            *(convolved, self.steps[tokens], self.layer, states, rows), by_position=by_position
        )
        return out, windows, states


def make_scan_step(
    num_tokens: int,
    device: str,
    dtype: torch.dtype,
    *,
    heads: int = 4,
    head_dim: int = 16,
    state_dim: int = 12,
    num_states: int = 14,
) -> ScanStep:
    """A step of a layer with heads in two groups; its inputs are parts of wider rows."""
    shared = 2 * state_dim
    channels = heads * head_dim + 2 * shared
    projected = torch.randn(num_tokens, channels + heads + 3).to(device, dtype)
    layer = ScanLayer(
        log_rate=torch.randn(heads).to(device),
        step_bias=torch.randn(heads).to(device),
        skip=torch.randn(heads).to(device),
        num_groups=2,
        head_dim=head_dim,
        state_dim=state_dim,
    )
    return ScanStep(
        projected[:, 3 : 3 + channels],
        projected[:, 3 + channels :],
        0.5 * torch.randn(4, channels).to(device, dtype),
        torch.randn(channels).to(device, dtype),
        layer,
        torch.randn(num_states, 3, channels).to(device, dtype),
        torch.randn(num_states, heads, state_dim, head_dim).to(device),
    )


def scan_case(device: str, dtype: torch.dtype) -> None:
    """Checks decodes, then rows of all kinds, as in a graph; with and without a bias."""
    for rows, head_dim in (
        (make_rows(SHORT_ROWS, drafts=[SHORT_ROWS[0].slot]), 40),
        (make_rows(ROWS, num_empty=2, num_decodes=0), 16),
        (WITH_DRAFTS, 16),
    ):
        step = make_scan_step(int(rows.piece_starts[-1]), device, dtype, head_dim=head_dim)
        if head_dim == 40:
            step = step._replace(bias=None)
        rows = to_device(device, rows)
        with registry.using("torch"):
            expected = step.run(rows)
        with registry.using("triton"):
            found = step.run(rows)
        tolerance = 1e-4 if dtype == torch.float32 else 4e-2
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def scan_invariance_case(device: str, dtype: torch.dtype) -> None:
    """Checks that a row's outputs and state are bitwise equal alone and in two parts."""
    step = make_scan_step(27, device, dtype)
    rows = make_rows((Row(0, 0, 1), Row(1, 4, 1), Row(2, 0, 23), Row(3, 7, 2)))
    with registry.using("triton"):
        expected, *kept = step.run(to_device(device, rows), by_position=True)
        alone = to_device(device, make_rows([Row(3, 7, 2)]))
        out, windows, states = step.run(alone, by_position=True, tokens=slice(25, 27))
        assert torch.equal(out, expected[25:])
        assert torch.equal(states[3], kept[1][3])
        outputs = []
        for part, tokens in ((Row(2, 0, 2), slice(2, 4)), (Row(2, 2, 21), slice(4, 25))):
            own = to_device(device, make_rows([part]))
            out, windows, states = step.run(own, by_position=True, tokens=tokens)
            step = step._replace(windows=windows, states=states)
            outputs.append(out)
    assert torch.equal(torch.cat(outputs), expected[2:25])
    assert torch.equal(windows[2], kept[0][2])
    assert torch.equal(states[2], kept[1][2])


SCAN_CASES = [scan_case, scan_invariance_case]
