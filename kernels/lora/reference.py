"""Torch implementation of LoRA."""

from __future__ import annotations

import torch

from kernels.lora.base import TILE_TOKENS, LoraTiles, LoraWeights, token_groups
from kernels.registry import op


@op
def add_lora_(
    out: torch.Tensor, x: torch.Tensor, weights: LoraWeights, tiles: LoraTiles
) -> torch.Tensor:
    """Adds B (A x) of each token's adapter to the output of a linear layer, in place. Tokens
    without an adapter are not touched.

    With `batch_invariant` weights, a token's result is bitwise independent of the other tokens;
    with the Triton kernel, it always is.

    Args:
        out: [T, out], contiguous: output of the layer.
        x: [T, in], contiguous: input of the layer.
        weights: the adapters' weights.
        tiles: the tokens by adapter.

    Returns:
        `out`.
    """
    groups = tiles.groups or token_groups(tiles.slots, tiles.tokens)
    if weights.native is not None:
        weights.native.add_(out, x, groups)
        return out
    for slot, first, end in groups.table.tolist():
        _add(out, x, weights, slot - 1, groups.tokens[first:end])
    return out


def _add(
    out: torch.Tensor, x: torch.Tensor, weights: LoraWeights, index: int, tokens: torch.Tensor
) -> None:
    """Adds the output of the adapter at `index` (0-based) to the outputs of `tokens`."""
    a, b = weights.a[index], weights.b[index]
    size = TILE_TOKENS if weights.batch_invariant else len(tokens)
    for rows in tokens.split(size):
        shrunk = _product(x.index_select(0, rows), a.t(), size)
        for start, stop, group in weights.parts:
            columns = slice(group * weights.rank, (group + 1) * weights.rank)
            part = _product(shrunk[:, columns], b[:, start:stop], size)
            out[:, start:stop].index_add_(0, rows, part[: len(rows)])


def _product(x: torch.Tensor, weight: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Multiplies x [R, K], padded to `num_rows` rows, by the weight [K, N]: [num_rows, N]. If the
    number of rows is fixed, the order of summation is always the same."""
    missing = num_rows - len(x)
    if missing:
        x = torch.nn.functional.pad(x, (0, 0, 0, missing))
    return torch.mm(x, weight)
