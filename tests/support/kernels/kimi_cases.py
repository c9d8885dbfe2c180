"""Steps of Kimi Delta Attention, and its Triton kernels against the torch reference."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels import KimiDeltaLayer, KimiGates, kimi_delta_attention, registry
from kernels.states import StateRows
from tests.support.kernels.delta_cases import (
    ROWS,
    SHORT_ROWS,
    WITH_DRAFTS,
    Row,
    make_rows,
    to_device,
)


class KimiStep(NamedTuple):
    """Inputs of a step."""

    x: torch.Tensor
    gates: KimiGates
    layer: KimiDeltaLayer
    states: torch.Tensor

    def run(
        self, rows: StateRows, *, by_position: bool = False, tokens: slice = slice(None)
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs some tokens of the step on a copy of the states; returns the outputs and the states
        after the step."""
        states = self.states.clone()
        gates = KimiGates(*(gate[tokens] for gate in self.gates))
        out = kimi_delta_attention(
            *(self.x[tokens].contiguous(), gates, self.layer, states, rows),
            by_position=by_position,
        )
        return out, states


def make_kimi_step(
    num_tokens: int,
    device: str,
    dtype: torch.dtype,
    *,
    heads: int = 2,
    key: int = 16,
    value: int = 16,
    num_states: int = 14,
) -> KimiStep:
    """Creates a step in which half of the tokens are equal, so that they have equal keys. Decays of
    some dimensions are so strong that nothing remains after two positions; step sizes are slices of
    wider rows."""
    layer = KimiDeltaLayer(
        log_rate=torch.randn(heads).to(device),
        step_bias=torch.randn(heads * key).to(device),
        norm=(1.0 + 0.1 * torch.randn(value)).to(device),
        eps=1e-6,
    )
    x = torch.randn(num_tokens, heads * (2 * key + value)).to(device, dtype)
    decay = torch.randn(num_tokens, heads * key) - 2.0
    decay[:, ::7] += 60.0
    wide = torch.randn(num_tokens, heads * (value + 2)).to(device, dtype)
    gates = KimiGates(decay.to(device, dtype), *wide[:, heads:].split([heads, heads * value], 1))
    for part in (x, *gates):
        part[num_tokens // 2 :] = part[-1].clone()
    return KimiStep(x, gates, layer, torch.randn(num_states, heads, key, value).to(device))


def kimi_case(device: str, dtype: torch.dtype) -> None:
    """Checks decodes with dimensions that are not powers of two, then rows of all kinds, as in a
    graph."""
    for rows, key, value, by_position in (
        (make_rows(SHORT_ROWS, drafts=[SHORT_ROWS[0].slot]), 20, 24, False),
        (make_rows(ROWS, num_empty=2, num_decodes=0), 24, 16, False),
        (WITH_DRAFTS, 16, 16, True),
    ):
        count = int(rows.piece_starts[-1])
        step = make_kimi_step(count, device, dtype, key=key, value=value)
        rows = to_device(device, rows)
        with registry.using("torch"):
            expected = step.run(rows, by_position=by_position)
        with registry.using("triton"):
            found = step.run(rows, by_position=by_position)
        tolerance = 2e-5 if dtype == torch.float32 else 4e-2
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def kimi_invariance_case(device: str, dtype: torch.dtype) -> None:
    """Checks that a row's outputs and state are bitwise equal alone and in two parts."""
    step = make_kimi_step(27, device, dtype)
    rows = make_rows((Row(0, 0, 1), Row(1, 4, 1), Row(2, 0, 23), Row(3, 7, 2)))
    with registry.using("triton"):
        expected, kept = step.run(to_device(device, rows), by_position=True)
        alone = to_device(device, make_rows([Row(3, 7, 2)]))
        out, states = step.run(alone, by_position=True, tokens=slice(25, 27))
        assert torch.equal(out, expected[25:])
        assert torch.equal(states[3], kept[3])
        outputs = []
        for part, tokens in ((Row(2, 0, 2), slice(2, 4)), (Row(2, 2, 21), slice(4, 25))):
            own = to_device(device, make_rows([part]))
            out, states = step.run(own, by_position=True, tokens=tokens)
            step = step._replace(states=states)
            outputs.append(out)
    assert torch.equal(torch.cat(outputs), expected[2:25])
    assert torch.equal(states[2], kept[2])


KIMI_CASES = [kimi_case, kimi_invariance_case]
