"""Block diffusion: algorithm and optimization names, request parameters, totals."""

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

_MAXIMA = {"threshold": 1, "edit_threshold": 1, "max_post_edit_steps": 1024, "penalty": 100}
"""Maximum of each number in DiffusionParams; the minimum is 0."""


class DiffusionParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Block-diffusion parameters of one request; None uses the server's default.

    Raises:
        ValueError: a value is out of range; the message names the field and the range.
    """

    algorithm: DllmAlgorithm | None = None
    """Decoding algorithm: how a round selects the positions to decode."""
    threshold: float | None = None
    """Confidence threshold: positions whose token is more likely than this are decoded; the most
    likely position always is."""
    edit_threshold: float | None = None
    """Probability above which a decoded token is replaced by another (JointThreshold)."""
    max_post_edit_steps: int | None = None
    """Maximum rounds of edits after a block is fully decoded (JointThreshold)."""
    penalty: float | None = None
    """Subtracted from the logit of the token just before a position (JointThreshold)."""
    stream_drafts: bool = False
    """Whether a stream includes the running block after every round."""

    def __post_init__(self) -> None:
        for name, maximum in _MAXIMA.items():
            value = getattr(self, name)
            if value is not None and not 0.0 <= value <= maximum:
                raise ValueError(f"diffusion.{name} must be in [0, {maximum}], got {value}")


class BlockTotals(msgspec.Struct, array_like=True):
    """Totals of block diffusion since the epoch began."""

    num_forwards: int = 0
    """Forward passes."""
    num_rounds: int = 0
    """Forward passes that decoded positions of a block, summed over blocks."""
    num_passes: int = 0
    """Forward passes over running blocks, summed over blocks."""
    num_tokens: int = 0
    """Tokens of finished blocks."""
