"""Attention that reads the lengths of rows on the device, as kernels do on CUDA."""

from __future__ import annotations

from dataclasses import replace

from kernels.attention import AttentionMetadata, AttentionStep
from kernels.attention.torch_backend import TorchAttention


class ByDeviceLengths(TorchAttention):
    """Backend that reads row lengths on the device; lengths on the host are only bounds."""

    def plan(self, metadata: AttentionMetadata) -> AttentionStep:
        own = metadata.seq_lens.tolist()
        assert all(a <= b for a, b in zip(own, metadata.seq_lens_host, strict=True))
        return super().plan(replace(metadata, seq_lens_host=own))
