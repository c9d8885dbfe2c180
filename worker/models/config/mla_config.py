"""Configuration of multi-head latent attention (MLA, arXiv 2405.04434), from config.json. Imports
no torch."""

from __future__ import annotations

from dataclasses import dataclass

from worker.models.config.checkpoint import positive_integer
from worker.models.config.family import RawConfig
from worker.models.config.rope_config import RopeConfig, yarn_magnitude


@dataclass(frozen=True, kw_only=True, slots=True)
class MlaConfig:
    """Sizes of multi-head latent attention: heads compute keys and values from one latent vector
    per token, and share the part of the key with rotary embedding."""

    q_rank: int | None
    """Size of the latent vector of queries; None if they are computed from the hidden state."""
    kv_rank: int
    """Size of the latent vector of keys and values."""
    plain_dim: int
    """Dimensions of a head's queries and keys without rotary embedding."""
    rotary_dim: int
    """Dimensions of a head's queries and keys with rotary embedding; for keys all heads share
    them."""
    value_dim: int
    """Dimensions of a head's values."""
    is_interleaved: bool
    """Whether rotary embedding rotates neighbouring dimensions, and not those of two halves."""
    score_factor: float
    """Factor of attention scores besides query_dim ** -0.5."""

    @property
    def query_dim(self) -> int:
        """Dimensions of a head's queries and keys."""
        return self.plain_dim + self.rotary_dim

    @property
    def cached_dim(self) -> int:
        """Dimensions that a layer caches per token: the latent vector and the rotary part of the
        key."""
        return self.kv_rank + self.rotary_dim


def parse_mla(raw: RawConfig, rope: RopeConfig, *, whole_heads: bool) -> MlaConfig:
    """Reads the sizes of multi-head latent attention.

    Args:
        raw: config.json with the family's defaults.
        rope: the rotary embedding.
        whole_heads: whether the key `head_dim` counts all dimensions of a query, and not only those
            with rotary embedding.

    Raises:
        ValueError: a size is missing, or keys contradict each other.
    """
    plain_dim, rotary_dim, kv_rank, value_dim = (
        positive_integer(raw, key)
        for key in ("qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank", "v_head_dim")
    )
    whole = ("qk_nope_head_dim", "qk_rope_head_dim")
    for key, *parts in (
        ("qk_head_dim", *whole),
        ("head_dim", *(whole if whole_heads else whole[1:])),  # as transformers writes it
        ("num_key_value_heads", "num_attention_heads"),
    ):
        if raw.get(key) not in (None, sum(raw[part] for part in parts)):
            said = " and ".join(f"{part} {raw[part]}" for part in parts)
            raise ValueError(
                f"{key} = {raw[key]!r} in config.json does not go with {said}: repair it"
            )
    if rotary_dim % 2:
        raise ValueError(
            f"qk_rope_head_dim {rotary_dim} in config.json is odd, but dimensions rotate in pairs: "
            "repair it"
        )
    has_q_rank = raw.get("q_lora_rank") is not None
    return MlaConfig(
        q_rank=positive_integer(raw, "q_lora_rank") if has_q_rank else None,
        kv_rank=kv_rank,
        plain_dim=plain_dim,
        rotary_dim=rotary_dim,
        value_dim=value_dim,
        is_interleaved=bool(raw.get("rope_interleave", True)),
        score_factor=_score_factor(raw, rope),
    )


def _score_factor(raw: RawConfig, rope: RopeConfig) -> float:
    """Factor of scores that DeepSeek's YaRN has in place of one of cosines and sines."""
    table = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    weight = table.get("mscale_all_dim")
    if rope.kind != "yarn" or not weight:
        return 1.0
    return yarn_magnitude(rope.factor, float(weight)) ** 2
