"""Constants of the noise hash, shared by the torch reference and the Triton kernel."""

WEYL = 0x9E3779B1
"""Odd multiplier of the column counter (2**32 divided by the golden ratio)."""
MIX_A = 0x7FEB352D
MIX_B = 0x846CA68B
"""Multipliers of the finalizer, with MIX_A: their avalanche bias was measured to be low (Wellons,
"Prospecting for Hash Functions")."""
UNIT = 2.0**-31
LARGEST_BELOW_ONE = 1.0 - 2.0**-24


def signed32(value: int) -> int:
    """The int32 with the bits of an unsigned 32-bit value."""
    return value - (1 << 32) if value >= 1 << 31 else value
