"""Gumbel noise keyed by (seed, position, column): sampling is an argmax of logits plus noise."""

from __future__ import annotations

from kernels.gumbel_noise.reference import gumbel_noise

__all__ = ["gumbel_noise"]
