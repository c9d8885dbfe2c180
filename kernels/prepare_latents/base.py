"""The latents of tokens, before they are normalised and rotated."""

from __future__ import annotations

from typing import NamedTuple

import torch


class LatentRows(NamedTuple):
    """Latents of T tokens; rows may be strided."""

    latents: torch.Tensor
    """[T, V]."""
    rotating: torch.Tensor
    """[T, R]; what is in it afterwards is of no use."""
    weight: torch.Tensor
    """[V], of the latents' root-mean-square norm."""
    eps: float
    """Added to the mean square."""
