"""Latents of tokens, before norm and rotary embedding."""

from __future__ import annotations

from typing import NamedTuple

import torch


class LatentRows(NamedTuple):
    """Latents of T tokens, and the parts of their keys with rotary embedding; rows may be
    strided."""

    latents: torch.Tensor
    """[T, V]: latents."""
    rotating: torch.Tensor
    """[T, R]: rotary parts of the keys; undefined after `prepare_latents`."""
    weight: torch.Tensor
    """[V]: weight of the latents' RMSNorm."""
    eps: float
    """Number that the RMSNorm adds to the mean square."""
