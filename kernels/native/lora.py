"""Native LoRA: low-rank matmuls in the compiled library, since a step with several adapters would
take hundreds of torch operators per layer."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from kernels.native.library import LoraStep, library

LORA_TYPES = (torch.float32, torch.bfloat16)
"""Data types that the library supports."""


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
        self._step = LoraStep(
            *(tensor.data_ptr() for tensor in self._kept),
            *(a.shape[2], b.shape[2], b.shape[1], a.shape[1] // b.shape[1], len(parts)),
        )
        self._step.num_threads = torch.get_num_threads()
        self._reference = ctypes.byref(self._step)
        self._run = library().rayfleet_add_lora

    def add_(
        self, out: torch.Tensor, x: torch.Tensor, tokens: torch.Tensor, groups: torch.Tensor
    ) -> None:
        """Adds B (A x) to the output of the layer, in place. Sums are in fp32, and bitwise
        independent of the other tokens.

        Args:
            out: [T, out], contiguous: output of the layer.
            x: [T, in], contiguous: input of the layer.
            tokens: int64 [n]: rows of `out` and `x`, one adapter after another.
            groups: int64 [adapters, 3]: 1-based slot of each adapter, and start and end of its
                tokens in `tokens`.
        """
        assert out.is_contiguous(), "tokens are rows"
        assert x.is_contiguous(), "tokens are rows"
        step = self._step
        step.out, step.x, step.tokens = out.data_ptr(), x.data_ptr(), tokens.data_ptr()
        step.groups, step.num_groups = groups.data_ptr(), len(groups)
        self._run(self._is_bf16, self._reference)
