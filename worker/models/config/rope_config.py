"""Configuration of the rotary embedding (RoPE), from config.json. Does not import torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from worker.models.config.schema import short

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]

_ANY_KIND = frozenset(
    {"rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "finetuned"}
)
_NO_NUMBERS = frozenset(
    {"rope_type", "type", "truncate", "finetuned", "short_factor", "long_factor"}
)
_KNOWN_KEYS: dict[RopeKind, frozenset[str]] = {
    "default": _ANY_KIND,
    "linear": _ANY_KIND,
    "dynamic": _ANY_KIND,
    "llama3": _ANY_KIND | {"low_freq_factor", "high_freq_factor"},
    "yarn": _ANY_KIND
    | {"beta_fast", "beta_slow", "truncate", "attention_factor", "attn_factor"}
    | {"mscale", "mscale_all_dim"},
    "longrope": _ANY_KIND | {"short_factor", "long_factor", "attention_factor"},
    "proportional": _ANY_KIND | {"partial_rotary_factor"},
}
"""Keys, by kind, that are read or have no effect; others are rejected."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Base and scaling of the rotary embedding."""

    kind: RopeKind = "default"
    """Kind of scaling. `dynamic` has no effect: it only scales beyond the training length, which is
    not supported."""
    theta: float = 10000.0
    """Base from which the wavelengths are computed (`rope_theta`)."""
    factor: float = 1.0
    """Factor by which the context (linear, llama3, yarn) or wavelengths (proportional) are
    stretched."""
    original_max_position_embeddings: int = 0
    """Context length before it was stretched (llama3, yarn, longrope)."""
    low_freq_factor: float = 1.0
    """Sets the longest wavelength that llama3 interpolates, original length / low_freq_factor;
    longer ones are stretched by `factor`."""
    high_freq_factor: float = 4.0
    """Sets the shortest wavelength that llama3 interpolates, original length / high_freq_factor;
    shorter ones are kept."""
    beta_fast: float = 32.0
    """Number of rotations over the original length above which yarn keeps wavelengths."""
    beta_slow: float = 1.0
    """Number of rotations over the original length below which yarn stretches wavelengths by
    `factor`; between `beta_slow` and `beta_fast`, it interpolates."""
    truncate: bool = True
    """Whether yarn rounds the ends of its ramp to whole dimensions."""
    attention_factor: float = 1.0
    """Factor applied to cosines and sines (yarn, longrope)."""
    short_factors: tuple[float, ...] | None = None
    """Factors applied to wavelengths, by pair of dimensions, in sequences within the original
    length (longrope). Longer sequences would need different factors, including for keys that are
    already cached."""
    rotating_share: float | None = None
    """Fraction of a head's dimension pairs, counted from the first, that have rotary embedding.
    Wavelengths are as if all pairs had it (proportional)."""
    query_beta: float | None = None
    """Factor beta in the query scale, 1 + beta * ln(1 + floor(position / original length)); None if
    queries are not scaled."""

    def scaled_length(self, max_position_embeddings: int) -> int:
        """Maximum sequence length, in tokens, that this rotary embedding supports, given the key
        `max_position_embeddings`."""
        if self.kind == "linear":
            return int(max_position_embeddings * self.factor)
        if self.kind == "yarn":
            return int(self.original_max_position_embeddings * self.factor)
        if self.kind == "longrope":
            return min(self.original_max_position_embeddings, max_position_embeddings)
        return max_position_embeddings


def parse_rope(
    raw: dict[str, Any],
    max_position_embeddings: int,
    *,
    query_beta: bool = False,
    by_layer: bool = False,
) -> RopeConfig:
    """Reads `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (earlier
    versions).

    Args:
        raw: keys of config.json, with the family's defaults.
        max_position_embeddings: value of this key in config.json.
        query_beta: whether the family may have `llama_4_scaling_beta` with yarn.
        by_layer: whether sliding-window layers have separate parameters, in which case those of
            full-attention layers are read.

    Raises:
        ValueError: a kind of scaling is not supported, or one of its numbers is missing.
    """
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    parameters = dict(raw.get(key) or {})
    if by_layer and key == "rope_parameters":
        parameters = _table_of("full_attention", parameters)
    else:
        parameters = _one_for_all_layers(parameters, key)
    return _parse_table(raw, parameters, key, max_position_embeddings, query_beta=query_beta)


def parse_window_rope(
    raw: dict[str, Any], max_position_embeddings: int, theta_key: str
) -> RopeConfig:
    """Reads the rotary embedding of sliding-window layers, to which `rope_scaling` does not apply.

    Args:
        raw: config.json.
        max_position_embeddings: value of this key in config.json.
        theta_key: key of the base, used if it is missing from `rope_parameters`.

    Raises:
        ValueError: a kind of scaling is not supported, or one of its numbers is missing.
    """
    key = "rope_parameters"
    table = _table_of("sliding_attention", dict(raw.get(key) or {}))
    table.setdefault("rope_theta", raw[theta_key])
    return _parse_table(raw, table, key, max_position_embeddings)


def without_shares(tables: dict[str, Any]) -> dict[str, Any]:
    """`rope_parameters` by layer type, without each type's `partial_rotary_factor`."""
    return {
        kind: {key: value for key, value in table.items() if key != "partial_rotary_factor"}
        if isinstance(table, dict)
        else table
        for kind, table in tables.items()
    }


def _table_of(kind: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """Parameters of one layer type in `rope_parameters`; empty if there are none."""
    tables = {"full_attention", "sliding_attention"}
    if not parameters.keys() <= tables or not all(
        isinstance(table, dict) for table in parameters.values() if table is not None
    ):
        raise ValueError(
            "rope_parameters in config.json must be an object with only the keys full_attention "
            "and sliding_attention, each with an object: fix it"
        )
    return dict(parameters.get(kind) or {})


def _parse_table(
    raw: dict[str, Any],
    parameters: dict[str, Any],
    key: str,
    max_position_embeddings: int,
    *,
    query_beta: bool = False,
) -> RopeConfig:
    """Reads one object of parameters, the value of `key` in config.json."""
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    kind = "longrope" if kind == "su" else kind  # the name in the first Phi-3 release
    if kind not in _KNOWN_KEYS:
        raise ValueError(
            f"{key}.rope_type {short(kind)} in config.json is not supported (supported: "
            f"{', '.join(_KNOWN_KEYS)}): use another checkpoint"
        )
    kind = cast("RopeKind", kind)
    beta = _query_beta(parameters, key) if query_beta and kind == "yarn" else None
    _check_keys(raw, parameters, kind, key)
    theta = float(parameters.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    original = int(
        raw.get("original_max_position_embeddings")
        or parameters.get("original_max_position_embeddings")
        or max_position_embeddings
    )
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "proportional":
        return _proportional(parameters, theta, key)
    if kind in ("yarn", "longrope") and parameters.get("factor") is None:
        parameters["factor"] = max_position_embeddings / original
    factor = _number(parameters, "factor", key)
    if kind in ("linear", "dynamic"):
        return RopeConfig(kind=kind, theta=theta, factor=factor)
    scaled = RopeConfig(
        kind=kind, theta=theta, factor=factor, original_max_position_embeddings=original
    )
    if kind == "llama3":
        return replace(
            scaled,
            low_freq_factor=_number(parameters, "low_freq_factor", key),
            high_freq_factor=_number(parameters, "high_freq_factor", key),
        )
    if kind == "longrope":
        return replace(
            scaled,
            attention_factor=_longrope_attention_factor(parameters, factor, original),
            short_factors=_short_factors(parameters, key),
        )
    return replace(
        scaled,
        beta_fast=float(parameters.get("beta_fast") or 32.0),
        beta_slow=float(parameters.get("beta_slow") or 1.0),
        truncate=bool(parameters.get("truncate", True)),
        attention_factor=_yarn_attention_factor(parameters, factor),
        query_beta=beta,
    )


def _query_beta(parameters: dict[str, Any], key: str) -> float | None:
    """Removes `llama_4_scaling_beta` from the parameters and returns it; None if it is missing."""
    parameters.pop("max_position_embeddings", None)  # transformers writes it twice
    if parameters.get("llama_4_scaling_beta") is None:
        parameters.pop("llama_4_scaling_beta", None)
        return None
    beta = _number(parameters, "llama_4_scaling_beta", key)
    del parameters["llama_4_scaling_beta"]
    return beta


def _proportional(parameters: dict[str, Any], theta: float, key: str) -> RopeConfig:
    """Reads proportional scaling (Gemma 4), whose two keys are 1 by default."""
    share, factor = (
        1.0 if parameters.get(name) is None else _number(parameters, name, key)
        for name in ("partial_rotary_factor", "factor")
    )
    if not 0 < share <= 1 or factor <= 0:
        raise ValueError(
            f"{key}: partial_rotary_factor {share} in config.json must be in (0, 1], and factor "
            f"{factor} must be greater than 0: fix it"
        )
    return RopeConfig(kind="proportional", theta=theta, factor=factor, rotating_share=share)


def _one_for_all_layers(parameters: dict[str, Any], key: str) -> dict[str, Any]:
    """Parameters shared by all layers, which may also be given per layer type. Raises ValueError if
    they then differ."""
    if "full_attention" not in parameters and "sliding_attention" not in parameters:
        return parameters
    tables = [table for table in parameters.values() if isinstance(table, dict)]
    if any(table != tables[0] for table in tables):
        raise ValueError(
            f"{key}: rope parameters that differ between layers are not supported: "
            "use another checkpoint"
        )
    return dict(tables[0])


def _check_keys(raw: dict[str, Any], parameters: dict[str, Any], kind: RopeKind, key: str) -> None:
    """Checks the keys of the parameters. `partial_rotary_factor` is allowed if config.json has the
    same value at the top level.

    Raises:
        ValueError: a key is unknown for this kind, or its value is not a number.
    """
    for name, value in parameters.items():
        if value is not None and name in _KNOWN_KEYS[kind] - _NO_NUMBERS:
            _number(parameters, name, key)
        is_repeated = name == "partial_rotary_factor" and value == raw.get(name, 1)
        if value is None or is_repeated or name.startswith("_"):
            continue
        if name not in _KNOWN_KEYS[kind]:
            raise ValueError(
                f"{key}.{name} = {short(value)} in config.json is not supported for rope_type "
                f"{kind}: it may change the model's outputs; use another checkpoint"
            )


def _number(parameters: dict[str, Any], name: str, key: str) -> float:
    value = parameters.get(name)
    if not isinstance(value, int | float):
        raise ValueError(
            f"{key}.{name} in config.json must be a number, got {short(value)}: fix it"
        )
    return float(value)


def _yarn_attention_factor(parameters: dict[str, Any], factor: float) -> float:
    """Factor applied to cosines and sines to correct the temperature: `attention_factor` or, if it
    is missing, YaRN's formula (arXiv 2309.00071, section 3.4) times `attn_factor`."""
    given, further = parameters.get("attention_factor"), parameters.get("attn_factor")
    if given is not None and further is not None:
        raise ValueError(
            "attention_factor and attn_factor of yarn in config.json are mutually exclusive: "
            "remove one of them"
        )
    if given is not None:
        return float(given)
    further = 1.0 if further is None else float(further)
    mscale, mscale_all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        whole = yarn_magnitude(factor, float(mscale_all_dim))
        return further * yarn_magnitude(factor, float(mscale)) / whole
    return further * yarn_magnitude(factor)


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """YaRN's `mscale` for a context that is `factor` times as long: the factor applied to both
    queries and keys."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _longrope_attention_factor(parameters: dict[str, Any], factor: float, original: int) -> float:
    """Factor that LongRoPE applies to cosines and sines to correct the temperature (arXiv
    2402.13753)."""
    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)
    if factor <= 1.0:
        return 1.0
    if original < 2:
        raise ValueError(
            "original_max_position_embeddings (default: max_position_embeddings) in config.json "
            f"must be at least 2, got {original}: fix it"
        )
    return math.sqrt(1.0 + math.log(factor) / math.log(original))


def _short_factors(parameters: dict[str, Any], key: str) -> tuple[float, ...]:
    factors = parameters.get("short_factor")
    if not isinstance(factors, list) or not all(
        isinstance(factor, int | float) and factor > 0 for factor in factors
    ):
        raise ValueError(
            f"{key}.short_factor in config.json must be a list of positive numbers, got "
            f"{short(factors)}: fix it"
        )
    return tuple(map(float, factors))
