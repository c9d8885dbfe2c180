"""What a request may ask of block diffusion, what it has done, and the names to choose from."""

from __future__ import annotations

from typing import Literal

import msgspec

DllmAlgorithm = Literal["LowConfidence", "JointThreshold"]
DllmFeature = Literal[
    "inplace",
    "mixed_rounds",
    "fused_commit",
    "skip_last_commit",
    "report_at_once",
    "early_exit",
    "masked_logits",
    "skip_unread",
]

_MOST = {"threshold": 1, "edit_threshold": 1, "max_post_edit_steps": 1024, "penalty": 100}
"""Of DiffusionParams; the least is 0."""


class DiffusionParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a block-diffusion model fills the blocks of one request; None takes the server's value.

    Raises:
        ValueError: a value is out of range; the message names the field and the range.
    """

    algorithm: DllmAlgorithm | None = None
    """Which positions a round decides."""
    threshold: float | None = None
    """A position is decided where its token's probability is above this; the likeliest one is in
    any case."""
    edit_threshold: float | None = None
    """A decided token is replaced where another's probability is above this (JointThreshold)."""
    max_post_edit_steps: int | None = None
    """Most rounds of replacing once a block has no undecided position (JointThreshold)."""
    penalty: float | None = None
    """Taken off the logit of the token that stands just before a position (JointThreshold)."""
    stream_drafts: bool = False
    """Whether a stream shows after every round how the running block stands."""

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            value = getattr(self, name)
            if value is not None and not 0.0 <= value <= most:
                raise ValueError(f"diffusion.{name} must be in [0, {most}], got {value}")


class BlockTotals(msgspec.Struct, array_like=True):
    """What block diffusion has done since the epoch began."""

    num_forwards: int = 0
    """Forward passes."""
    num_rounds: int = 0
    """Passes that found something to decide in a block, summed over blocks."""
    num_passes: int = 0
    """All passes of running blocks, summed over blocks."""
    num_tokens: int = 0
    """Tokens of blocks that were done."""
