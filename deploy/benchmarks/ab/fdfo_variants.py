"""Variants of running blocks that `python -m deploy.benchmarks fdfo` compares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple, get_args

from worker.config import EngineConfig
from worker.protocol.diffusion import DllmFeature


class Variant(NamedTuple):
    """Options by which an engine runs blocks."""

    first_out: bool
    """Whether a block that is done leaves its batch at once (`dllm_fdfo`)."""
    features: tuple[str, ...]
    """Features that are enabled; all others are in `dllm_disable`."""
    caches: bool
    """Whether the engine has a prefix cache."""
    overlaps: bool = False
    """Whether `--overlap-depth` is used; otherwise it is 0."""

    def config(self, engine: EngineConfig, running: int) -> EngineConfig:
        """The engine's configuration for this variant with at most `running` requests."""
        return engine.with_options(
            max_num_seqs=running,
            dllm_fdfo=self.first_out,
            dllm_disable=tuple(f for f in get_args(DllmFeature) if f not in self.features),
            enable_prefix_caching=self.caches,
            overlap_depth=engine.execution.overlap_depth if self.overlaps else 0,
        )


VARIANTS: Final[Mapping[str, Variant]] = {
    "synchronous": Variant(False, ("inplace", "mixed_rounds"), False),
    "fdfo": Variant(True, ("inplace", "mixed_rounds"), False),
    "fused": Variant(True, ("inplace", "mixed_rounds", "fused_commit", "skip_last_commit"), False),
    "full": Variant(True, get_args(DllmFeature), False, overlaps=True),
    "cached": Variant(True, ("inplace", "mixed_rounds"), True),
    "reentry": Variant(True, ("mixed_rounds",), True),
}
"""Variants by name; `cached` is the baseline of `reentry`."""
LONG_VARIANTS: Final[Mapping[str, Variant]] = {
    "synchronous": Variant(False, ("inplace",), False),
    "fdfo": Variant(True, ("inplace",), False),
    "full": VARIANTS["full"],
}
"""Variants for long uncached prompts, by name."""
