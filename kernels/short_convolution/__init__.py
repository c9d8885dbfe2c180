"""Short causal convolution of each channel over its last N inputs; the last N - 1 inputs are kept
as a state per request.

    y_t = bias + sum over n < N of weight_n x_(t - N + 1 + n), possibly followed by SiLU

Layers of LFM2, Mamba-2 and Kimi Linear contain it. On CUDA, a step takes two launches.
"""

from __future__ import annotations

from kernels.short_convolution.reference import convolve, short_convolution

__all__ = ["convolve", "short_convolution"]
