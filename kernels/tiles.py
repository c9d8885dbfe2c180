"""Grid and tile sizes of Triton kernels.

These are plain functions: Triton's functions of the same names also work in kernels, and therefore
take 2 us per call on the host, a quarter of the time of a launch. An eager step makes a dozen such
calls per layer; if layers are small, the device waits for them.
"""

from __future__ import annotations


def cdiv(size: int, block: int) -> int:
    """Number of programs that cover `size` elements in blocks of `block`."""
    return -(-size // block)


def next_power_of_2(size: int) -> int:
    """Smallest power of 2 that is at least `size`: a valid width of Triton's tiles."""
    assert size > 0, "size must be positive"
    return 1 << (size - 1).bit_length()


def count_warps(width: int) -> int:
    """Number of warps for a program that processes a row of `width` elements: at most 16 elements
    per thread, up to a width of 4,096."""
    if width <= 512:
        return 1
    return 4 if width <= 2048 else 8
