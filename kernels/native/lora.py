"""Native LoRA: low-rank matmuls in the compiled library, since a step with several adapters would
take hundreds of torch operators per layer."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch

from kernels.native.library import LoraStep, LoraTensors, LoraTokens, library

LORA_TYPES = (torch.float32, torch.bfloat16)
"""Data types that the library supports."""


class TokenGroups(NamedTuple):
    """Tokens of a step by adapter, on the host."""

    tokens: torch.Tensor
    """int64 [n]: indices of the tokens, one adapter after another."""
    table: torch.Tensor
    """int64 [adapters, 3]: the adapter's 1-based slot, and start and end of its tokens in `tokens`.
    """

    def described(self) -> LoraTokens:
        """The groups in the form that the library reads."""
        return LoraTokens(self.tokens.data_ptr(), self.table.data_ptr(), len(self.table))


class StepAdapters(NamedTuple):
    """Tokens of a step that have an adapter."""

    all: TokenGroups
    """Indices among all tokens."""
    selected: TokenGroups
    """Indices among the tokens whose hidden states are needed."""


class NativeLora:
    """Adapters of a linear layer on CPU.

    Args:
        a: [slots, projections * rank, in], contiguous, of a type in `LORA_TYPES`: A matrices.
        b: [slots, rank, out], contiguous: transposed B matrices.
        parts: first output feature, end and projection of each part.
    """

    def __init__(
        self, a: torch.Tensor, b: torch.Tensor, parts: Sequence[tuple[int, int, int]]
    ) -> None:
        self.ranks = torch.zeros(len(a), dtype=torch.int64)
        """int64 [slots]: number of leading ranks of A and B that are not zero."""
        self._kept = a, b, self.ranks, torch.tensor(parts, dtype=torch.int64)
        self._is_bf16 = a.dtype == torch.bfloat16
        self.tensors = LoraTensors(
            *(tensor.data_ptr() for tensor in self._kept),
            *(a.shape[2], b.shape[2], b.shape[1], a.shape[1] // b.shape[1], len(parts)),
        )
        """The adapters in the form that the library reads; valid as long as this object."""
        self._step = LoraStep(ctypes.pointer(self.tensors))
        self._step.num_threads = torch.get_num_threads()
        self._reference = ctypes.byref(self._step)
        self._run = library().rayfleet_add_lora

    def add_(self, out: torch.Tensor, x: torch.Tensor, groups: TokenGroups) -> None:
        """Adds B (A x) to the output of the layer, in place. Sums are in fp32, and bitwise
        independent of the other tokens.

        Args:
            out: [T, out], contiguous: output of the layer.
            x: [T, in], contiguous: input of the layer.
            groups: rows of `out` and `x`, by adapter.
        """
        assert out.is_contiguous(), "tokens are rows"
        assert x.is_contiguous(), "tokens are rows"
        step = self._step
        step.out, step.x, step.tokens = out.data_ptr(), x.data_ptr(), groups.described()
        self._run(self._is_bf16, self._reference)
