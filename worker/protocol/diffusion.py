"""Block diffusion: names of algorithms and optimizations, request parameters, and totals."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

DllmAlgorithm = Literal[
    "LowConfidence",
    "LowConfidenceStatic",
    "Sequential",
    "EntropyBounded",
    "JointThreshold",
    "JointThresholdInDel",
]
EDITING: Final = ("JointThreshold", "JointThresholdInDel")
"""Algorithms that may replace tokens that are already decoded."""
CANVAS_ALGORITHM: Final = "Gemma4Renoise"
"""The only algorithm that models with canvases support, named as in SGLang."""
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

_RANGES = {
    "threshold": (0, 1),
    "steps": (1, 1024),
    "entropy_bound": (0, 1024),
    "edit_threshold": (0, 1),
    "max_post_edit_steps": (0, 1024),
    "penalty": (0, 100),
}
"""Minimum and maximum of each numeric field of DiffusionParams."""


class DiffusionParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Block-diffusion parameters of one request. For a field that is None, the server's default is
    used.

    Raises:
        ValueError: a value is out of range; the message names the field and the range.
    """

    algorithm: DllmAlgorithm | None = None
    """Decoding algorithm: how a round selects the positions to decode."""
    threshold: float | None = None
    """Confidence threshold: positions whose most likely token has a higher probability are decoded;
    the most confident position always is (LowConfidence, JointThreshold, JointThresholdInDel; with
    a grammar, all algorithms)."""
    steps: int | None = None
    """Maximum number of rounds per block, over which the positions are distributed evenly: each
    round decodes at least its share (LowConfidence), or exactly its share (LowConfidenceStatic,
    Sequential). The default is the block size, for one position per round. For canvases, the
    checkpoint specifies the default."""
    entropy_bound: float | None = None
    """Positions are decoded in ascending order of entropy while the sum of their entropies, in
    nats, does not exceed this bound; the first position always is (EntropyBounded). The default is
    0.35; for canvases, the checkpoint specifies it."""
    edit_threshold: float | None = None
    """Probability above which a decoded token is replaced by another (JointThreshold,
    JointThresholdInDel)."""
    max_post_edit_steps: int | None = None
    """Maximum number of edit rounds after a block is fully decoded (JointThreshold,
    JointThresholdInDel)."""
    penalty: float | None = None
    """Penalty subtracted, at each position, from the logit of the token at the preceding position
    (JointThreshold)."""
    stream_drafts: bool = False
    """Whether a stream includes the running block after every round."""

    def __post_init__(self) -> None:
        for name, (minimum, maximum) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not minimum <= value <= maximum:
                raise ValueError(f"diffusion.{name} must be in [{minimum}, {maximum}], got {value}")


class BlockTotals(msgspec.Struct, array_like=True):
    """Totals of block diffusion since the epoch began."""

    num_forwards: int = 0
    """Number of forward passes of the model."""
    num_rounds: int = 0
    """Number of forward passes that decoded positions of a block, summed over blocks."""
    num_passes: int = 0
    """Number of forward passes over running blocks, summed over blocks."""
    num_tokens: int = 0
    """Number of tokens in finished blocks."""
