"""Norm: parameters of one norm of a residual sum, and checks of their combinations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

MOST_NORMS = 3
"""Maximum number of norms of one sum: an MLP, a router and experts may each have a separate one."""


class Norm(NamedTuple):
    """A norm over rows [H], and the data type of its result."""

    weight: torch.Tensor
    """[H]: weight of the norm."""
    bias: torch.Tensor | None = None
    """[H]: bias of a LayerNorm; None if unused."""
    subtracts_mean: bool = False
    """Whether the norm is a LayerNorm, which rounds once, at the end; an RMSNorm rounds before and
    after the weight is applied, like `rms_norm`."""
    is_fp32: bool = False
    """Whether the result is fp32; its values are always rounded to the dtype of the rows first."""


def check_norms(
    residual: torch.Tensor | None,
    norms: Sequence[Norm],
    x_weight: torch.Tensor | None,
    total_scale: torch.Tensor | None,
) -> None:
    """Asserts that `fused_add_norm` supports the arguments."""
    assert len(norms) <= MOST_NORMS, "too many norms for the kernel"
    assert len({norm.subtracts_mean for norm in norms}) <= 1, "norms must share one statistic"
    biased = [norm for norm in norms if norm.bias is not None]
    assert not biased or len(norms) == 1, "a norm with a bias must be the only one"
    assert all(norm.subtracts_mean for norm in biased), "only LayerNorm has a bias"
    assert residual is not None or (x_weight is None and total_scale is None), "no residual"
