"""Base of the schemas of families with multi-head latent attention (MLA). Does not import torch."""

from __future__ import annotations

from typing import ClassVar

from worker.models.config.family import FamilyConfig
from worker.models.config.mla_config import IndexerConfig, MlaConfig
from worker.models.config.rope_config import RopeConfig, yarn_magnitude
from worker.models.config.schema import Count, Index


class LatentFamilyConfig(FamilyConfig):
    """config.json of a family with multi-head latent attention."""

    head_dim_is_whole: ClassVar[bool] = False
    """Whether the key `head_dim` counts all dimensions of a query, not just those with rotary
    embedding."""

    kv_lora_rank: Count = 512
    q_lora_rank: Count | None = 1536
    qk_nope_head_dim: Count = 128
    qk_rope_head_dim: Count = 64
    v_head_dim: Count = 128
    qk_head_dim: Index | None = None
    rope_interleave: bool = True

    def head_size(self) -> int:
        """Size of a head in the rotary embedding's configuration: the dimensions with rotary
        embedding, or all dimensions if `partial_rotary_factor` selects the rotary ones."""
        rotary, plain, share = (
            self.qk_rope_head_dim,
            self.qk_nope_head_dim,
            self.partial_rotary_factor,
        )
        if share in (None, 1):
            return rotary
        if int((plain + rotary) * float(share or 0)) != rotary:
            raise ValueError(
                f"partial_rotary_factor {share} in config.json is inconsistent with "
                f"qk_nope_head_dim {plain} and qk_rope_head_dim {rotary}: make them consistent"
            )
        return plain + rotary

    def mla(self, rope: RopeConfig) -> MlaConfig:
        """Sizes of the latent attention; raises ValueError if keys contradict each other."""
        self._check_sizes()
        return MlaConfig(
            q_rank=self.q_lora_rank,
            kv_rank=self.kv_lora_rank,
            plain_dim=self.qk_nope_head_dim,
            rotary_dim=self.qk_rope_head_dim,
            value_dim=self.v_head_dim,
            is_interleaved=self.rope_interleave,
            score_factor=score_factor(self, rope),
            indexer=self.indexer(),
        )

    def indexer(self) -> IndexerConfig | None:
        """Sparse attention; None if queries attend to all tokens."""
        return None

    def _check_sizes(self) -> None:
        rotary = {"qk_rope_head_dim": self.qk_rope_head_dim}
        sizes = {"qk_nope_head_dim": self.qk_nope_head_dim, **rotary}
        for key, value, parts in (
            ("qk_head_dim", self.qk_head_dim, sizes),
            ("head_dim", self.head_dim, sizes if self.head_dim_is_whole else rotary),
            (
                "num_key_value_heads",
                self.num_key_value_heads,
                {"num_attention_heads": self.num_attention_heads},
            ),
        ):
            if value not in (None, sum(parts.values())):
                others = " and ".join(f"{part} {size}" for part, size in parts.items())
                raise ValueError(
                    f"{key} = {value} in config.json is inconsistent with {others}: make them "
                    "consistent"
                )
        if self.qk_rope_head_dim % 2:
            raise ValueError(
                f"qk_rope_head_dim {self.qk_rope_head_dim} in config.json must be even, since "
                "dimensions rotate in pairs: fix it"
            )


def score_factor(family: FamilyConfig, rope: RopeConfig) -> float:
    """Factor that DeepSeek's YaRN applies to scores instead of to cosines and sines; 1 without such
    scaling."""
    weight = (family.rope_scaling or family.rope_parameters or {}).get("mscale_all_dim")
    if rope.kind != "yarn" or not weight:
        return 1.0
    return yarn_magnitude(rope.factor, float(weight)) ** 2
