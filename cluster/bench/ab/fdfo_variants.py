"""The ways to run blocks that `rayfleet bench fdfo` compares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final, NamedTuple, get_args

from worker.config import EngineConfig
from worker.wire.diffusion import DllmFeature


class Variant(NamedTuple):
    """How an engine runs blocks."""

    first_out: bool
    features: tuple[str, ...]
    """Refinements that are on."""
    caches: bool
    """Whether it has a prefix cache."""
    overlaps: bool = False
    """Whether `--overlap-depth` counts; otherwise no step leaves before a result is reported."""

    def config(self, engine: EngineConfig, running: int) -> EngineConfig:
        """The engine of this variant, which runs so many requests at once."""
        return replace(
            engine,
            max_num_seqs=running,
            dllm_fdfo=self.first_out,
            dllm_disable=tuple(f for f in get_args(DllmFeature) if f not in self.features),
            enable_prefix_caching=self.caches,
            overlap_depth=engine.overlap_depth if self.overlaps else 0,
        )


VARIANTS: Final[Mapping[str, Variant]] = {
    "synchronous": Variant(False, ("inplace", "mixed_rounds"), False),
    "fdfo": Variant(True, ("inplace", "mixed_rounds"), False),
    "fused": Variant(True, ("inplace", "mixed_rounds", "fused_commit", "skip_last_commit"), False),
    "full": Variant(True, get_args(DllmFeature), False, overlaps=True),
    "cached": Variant(True, ("inplace", "mixed_rounds"), True),
    "reentry": Variant(True, ("mixed_rounds",), True),
}
"""`cached` is what `reentry` is compared with."""
LONG_VARIANTS: Final[Mapping[str, Variant]] = {
    "synchronous": Variant(False, ("inplace",), False),
    "fdfo": Variant(True, ("inplace",), False),
    "full": VARIANTS["full"],
}
