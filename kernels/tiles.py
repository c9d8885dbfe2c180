"""Sizes of what programs of a Triton kernel compute, and how many there are.

Plain functions: Triton's own of these names are made for kernels, too, and take 2 us a call on the
host, a quarter of a launch. A step that is launched kernel by kernel makes a dozen such calls per
layer, and the device waits for them where layers are small.
"""

from __future__ import annotations


def cdiv(size: int, block: int) -> int:
    """Programs that cover `size` elements in blocks of `block`."""
    return -(-size // block)


def next_power_of_2(size: int) -> int:
    """The least power of 2 that is no less than `size`, which is 1 at least: what Triton's ranges
    and tiles are as wide as."""
    assert size > 0, "nothing is computed"
    return 1 << (size - 1).bit_length()


def count_warps(width: int) -> int:
    """Warps of a program whose row is so wide: 16 elements for each thread, or fewer."""
    if width <= 512:
        return 1
    return 4 if width <= 2048 else 8
