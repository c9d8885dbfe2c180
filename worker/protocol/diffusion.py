"""Block diffusion: names of algorithms and optimizations, a request's parameters, totals."""

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
"""Largest value of each number in DiffusionParams; the least is 0."""


class DiffusionParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Parameters of block diffusion for one request; None takes the server's value.

    Raises:
        ValueError: a value is out of range; the message names the field and the range.
    """

    algorithm: DllmAlgorithm | None = None
    """Decoding algorithm: how a round chooses the positions that it decides."""
    threshold: float | None = None
    """Probability of its token above which a position is decided; in any case the likeliest one
    is."""
    edit_threshold: float | None = None
    """Probability above which another token replaces a decided one (JointThreshold)."""
    max_post_edit_steps: int | None = None
    """Most rounds of replacement once a block has no undecided position (JointThreshold)."""
    penalty: float | None = None
    """Subtracted from the logit of the token that stands just before a position
    (JointThreshold)."""
    stream_drafts: bool = False
    """Whether a stream carries the running block after every round."""

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            value = getattr(self, name)
            if value is not None and not 0.0 <= value <= most:
                raise ValueError(f"diffusion.{name} must be in [0, {most}], got {value}")


class BlockTotals(msgspec.Struct, array_like=True):
    """Totals of block diffusion since the epoch began."""

    num_forwards: int = 0
    """Forward passes."""
    num_rounds: int = 0
    """Passes that decided positions of a block, summed over blocks."""
    num_passes: int = 0
    """All passes over running blocks, summed over blocks."""
    num_tokens: int = 0
    """Tokens that finished blocks added to their requests."""
