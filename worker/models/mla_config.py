"""The configuration of multi-head latent attention (arXiv 2405.04434), from config.json. No
torch."""

from __future__ import annotations

from dataclasses import dataclass

from worker.models.checkpoint import positive_integer
from worker.models.family import RawConfig
from worker.models.rope_config import RopeConfig, yarn_magnitude


@dataclass(frozen=True, kw_only=True, slots=True)
class MlaConfig:
    """Sizes of an attention whose heads compute keys and values from one latent vector per token,
    beside which all of them share a part of the key that rotates."""

    q_rank: int | None
    """Size of what queries are computed from; None where it is the hidden state itself."""
    kv_rank: int
    """Size of the latent vector."""
    plain_dim: int
    """Dimensions of a head's queries and keys that do not rotate."""
    rotary_dim: int
    """Dimensions that rotate, the same of all heads' keys."""
    value_dim: int
    """Dimensions of a head's values."""
    is_interleaved: bool
    """Whether neighbouring dimensions rotate together, not those of two halves."""
    score_factor: float
    """Factor on products of queries and keys besides."""

    @property
    def query_dim(self) -> int:
        """Dimensions of a head's queries and keys."""
        return self.plain_dim + self.rotary_dim

    @property
    def cached_dim(self) -> int:
        """Values that a layer keeps of a token: the latent vector, and what rotates."""
        return self.kv_rank + self.rotary_dim


def parse_mla(raw: RawConfig, rope: RopeConfig, *, whole_heads: bool) -> MlaConfig:
    """Reads the sizes of a family that has such attention.

    Args:
        raw: config.json.
        rope: its rotary embedding.
        whole_heads: whether `head_dim` is of whole queries, and not of what rotates of them.

    Raises:
        ValueError: a size is missing, or keys do not go together.
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
    """DeepSeek's yarn multiplies products where other models multiply cosines and sines."""
    table = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    weight = table.get("mscale_all_dim")
    if rope.kind != "yarn" or not weight:
        return 1.0
    return yarn_magnitude(rope.factor, float(weight)) ** 2
