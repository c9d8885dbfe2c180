"""The gated delta rule in chunks, against a naive reference."""

from __future__ import annotations

import pytest
import torch

from kernels.gated_delta_rule import (
    DeltaInputs,
    causal_convolution,
    gated_delta_chunks,
    gated_delta_steps,
)

HEADS, KEY, VALUE = 3, 16, 8


def draw(
    count: int, decay: float = 1.0, *, by_channel: bool = False
) -> tuple[DeltaInputs, torch.Tensor]:
    torch.manual_seed(count)
    k = torch.nn.functional.normalize(torch.randn(count, HEADS, KEY), dim=-1)
    inputs = DeltaInputs(
        torch.randn(count, HEADS, KEY),
        k,
        torch.randn(count, HEADS, VALUE),
        -decay * torch.rand(count, HEADS, *([KEY] if by_channel else [])),
        torch.rand(count, HEADS),
    )
    return inputs, torch.randn(HEADS, KEY, VALUE)


def by_the_rule(inputs: DeltaInputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In double precision, head by head and position by position."""
    states, outputs = state.double().clone(), []
    for q, k, v, decay, share in zip(*(x.double() for x in inputs), strict=True):
        for head in range(HEADS):
            own = states[head] * decay[head].exp().unsqueeze(-1)
            states[head] = own + torch.outer(k[head], share[head] * (v[head] - own.T @ k[head]))
        outputs.append(torch.stack([states[head].T @ q[head] for head in range(HEADS)]))
    return torch.stack(outputs).float(), states.float()


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 200])
@pytest.mark.parametrize("decay", [0.01, 40.0])
@pytest.mark.parametrize("by_channel", [False, True])
def test_chunks_follow_the_rule(count: int, decay: float, by_channel: bool) -> None:
    inputs, state = draw(count, decay, by_channel=by_channel)
    expected = by_the_rule(inputs, state)
    for by_position in (False, True):
        found = gated_delta_chunks(inputs, state, by_position=by_position)
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("by_channel", [False, True])
def test_a_row_may_be_cut_anywhere(by_channel: bool) -> None:
    inputs, state = draw(90, by_channel=by_channel)
    whole, last = gated_delta_chunks(inputs, state, by_position=True)
    parts = []
    for start, end in ((0, 31), (31, 32), (32, 90)):
        part, state = gated_delta_chunks(inputs.part(start, end), state, by_position=True)
        parts.append(part)
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(state, last)


@pytest.mark.parametrize("by_channel", [False, True])
def test_rows_of_one_position_do_not_see_each_other(by_channel: bool) -> None:
    inputs, _ = draw(37, by_channel=by_channel)
    states = torch.randn(37, HEADS, KEY, VALUE)
    together = gated_delta_steps(inputs, states)
    for row in (0, 17, 36):
        alone = gated_delta_steps(inputs.part(row, row + 1), states[row : row + 1])
        for mine, all_rows in zip(alone, together, strict=True):
            assert torch.equal(mine[0], all_rows[row])


def test_the_convolution_continues_where_it_was_cut() -> None:
    torch.manual_seed(0)
    inputs, weight = torch.randn(3 + 20, 5), torch.randn(5, 4)
    whole = causal_convolution(inputs, weight)
    expected = torch.nn.functional.conv1d(inputs.T[None], weight[:, None], groups=5)[0].T
    torch.testing.assert_close(whole, torch.nn.functional.silu(expected))
    assert torch.equal(causal_convolution(inputs[7:], weight), whole[7:])
    batch = torch.stack((inputs[:4], inputs[5:9]))
    assert torch.equal(causal_convolution(batch, weight)[:, 0], whole[[0, 5]])
