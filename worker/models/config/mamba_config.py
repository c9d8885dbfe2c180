"""Configuration of Mamba-2 layers. Does not import torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from worker.models.config.schema import short

_FP32_MAX = 3.4028234663852886e38

GateOrder = Literal["gate first", "norm first", "no norm"]
"""Order of the output gate and the norm over a group; "no norm" if there is only the gate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MambaConfig:
    """Sizes of a model's Mamba-2 layers, and differences between families."""

    num_heads: int
    head_dim: int
    num_groups: int
    """Number of groups of heads; the heads of a group share B and C, and the mean square of the
    norm."""
    state_dim: int
    """Size of B, and of C, per group of heads."""
    num_taps: int
    """Kernel size of the convolution: number of consecutive tokens that an output depends on."""
    conv_bias: bool = True
    input_bias: bool = False
    output_bias: bool = False
    order: GateOrder = "gate first"
    multipliers: tuple[float, ...] | None = None
    """Factors applied to z, x, B, C and dt; None if there are none."""

    @property
    def widths(self) -> list[int]:
        """Widths of z, x, B, C and dt in a projected token."""
        values, shared = self.num_heads * self.head_dim, self.num_groups * self.state_dim
        return [values, values, shared, shared, self.num_heads]


def checked_mamba(
    config: MambaConfig, heads_key: str, groups_key: str, step_limit: Any
) -> MambaConfig:
    """Checks the configuration of Mamba-2 layers, and returns it.

    Args:
        config: the configuration.
        heads_key: key of the number of heads, for messages.
        groups_key: key of the number of groups.
        step_limit: `time_step_limit`; None if it is missing.

    Raises:
        ValueError: the number of heads is not a multiple of the number of groups, or step sizes are
            limited.
    """
    if config.num_heads % config.num_groups:
        raise ValueError(
            f"{heads_key} {config.num_heads} in config.json is not a multiple of {groups_key} "
            f"({config.num_groups}): make them consistent"
        )
    limits = [0.0, math.inf] if step_limit is None else list(map(_number, step_limit))
    if limits != [0.0, math.inf]:
        raise ValueError(
            f"time_step_limit = {short(step_limit)} in config.json is not supported: it must be "
            "[0.0, Infinity]"
        )
    return config


def mamba_head_dim(size: int, num_heads: int, head_dim: int | str, size_key: str) -> int:
    """Size of a head, from `mamba_d_head`, which may be "auto".

    Args:
        size: total size of all heads.
        num_heads: `mamba_n_heads`.
        head_dim: `mamba_d_head`.
        size_key: key from which `size` is derived, for messages.

    Raises:
        ValueError: the keys disagree.
    """
    found = size // num_heads if isinstance(head_dim, str) else head_dim
    if found * num_heads != size:
        raise ValueError(
            f"mamba_n_heads {num_heads} and mamba_d_head {head_dim} in config.json disagree with "
            f"{size_key}: their product must be {size}; fix it"
        )
    return found


def _number(value: Any) -> Any:
    """A number in `time_step_limit`. transformers 5 writes infinity as an object, and some
    checkpoints write it as a number beyond the FP32 range."""
    if isinstance(value, float) and value > _FP32_MAX:
        return math.inf
    return math.inf if value in ({"__float__": "Infinity"}, "Infinity", "inf") else value
