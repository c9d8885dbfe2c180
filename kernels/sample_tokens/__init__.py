"""Sampling of tokens: greedy and random rows of a batch in one call, with parameters on the
device."""

from __future__ import annotations

from kernels.sample_tokens.base import GREEDY_BELOW, SamplingParameters, TokenCells
from kernels.sample_tokens.reference import sample_tokens

__all__ = ["GREEDY_BELOW", "SamplingParameters", "TokenCells", "sample_tokens"]
