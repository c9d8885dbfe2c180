"""Sharding of a model among tensor-parallel ranks. Does not import torch."""

from __future__ import annotations

from dataclasses import replace

from worker.models.config.model_config import ModelConfig
from worker.models.config.moe_config import MoeConfig

_MOST_RANKS = 64
"""Maximum number of ranks suggested in messages."""


def divide(size: int, world_size: int, what: str) -> int:
    """`size` divided by the number of ranks.

    Raises:
        ValueError: the result is not an integer; the message names `what` and the numbers.
    """
    if size % world_size:
        raise ValueError(
            f"--tensor-parallel-size {world_size} does not divide {what} ({size}): use a divisor"
        )
    return size // world_size


def local_heads(config: ModelConfig, world_size: int) -> tuple[int, int]:
    """Numbers of query heads and KV heads on one rank.

    Raises:
        ValueError: the heads cannot be divided evenly among the ranks; the message has the numbers.
    """
    num_heads = divide(config.num_heads, world_size, "the number of attention heads")
    if config.num_kv_heads >= world_size:
        return num_heads, divide(config.num_kv_heads, world_size, "the number of key-value heads")
    if world_size % config.num_kv_heads:
        raise ValueError(
            f"--tensor-parallel-size {world_size} is not a multiple of the number of key-value "
            f"heads ({config.num_kv_heads}): use a multiple"
        )
    return num_heads, 1


def divide_experts(moe: MoeConfig, world_size: int, *, expert_parallel: bool) -> tuple[int, int]:
    """Number of experts, and of columns per expert, on one rank.

    Raises:
        ValueError: experts, or their columns, cannot be divided evenly among the ranks.
    """
    if not expert_parallel:
        return moe.num_experts, divide(moe.intermediate_size, world_size, "the size of an expert")
    if moe.num_experts % world_size:
        raise ValueError(
            f"--tensor-parallel-size {world_size} does not divide the number of experts "
            f"({moe.num_experts}): use a divisor"
        )
    return moe.num_experts // world_size, moe.intermediate_size


def check_sharing(config: ModelConfig, world_size: int, *, expert_parallel: bool = False) -> None:
    """Checks, before startup, that a model can be divided evenly among the ranks.

    Layers check this again when they are built; group-quantized weights may rule out further
    numbers of ranks.

    Raises:
        ValueError: the model cannot be divided. The second line of the message lists numbers of
            ranks that work.
    """
    if expert_parallel and config.moe is None:
        raise ValueError(
            "--enable-expert-parallel requires a mixture-of-experts model, but config.json of "
            f"{config.architecture} has no experts: remove the flag"
        )
    try:
        _share(config, world_size, expert_parallel)
    except ValueError as error:
        possible = [
            n for n in range(1, _MOST_RANKS + 1) if _is_possible(config, n, expert_parallel)
        ]
        remedy = f"set --tensor-parallel-size to one of {', '.join(map(str, possible))}"
        if expert_parallel:
            remedy = f"remove --enable-expert-parallel, or {remedy}"
        raise ValueError(f"{str(error).rpartition(': ')[0]}\n{remedy}") from error


def _is_possible(config: ModelConfig, world_size: int, expert_parallel: bool) -> bool:
    try:
        _share(config, world_size, expert_parallel)
    except ValueError:
        return False
    return True


def _share(config: ModelConfig, world_size: int, expert_parallel: bool) -> None:
    if config.mla is not None:
        divide(config.num_heads, world_size, "the number of attention heads")
    else:
        for heads in (config, config.for_full_layers()):
            for num_heads in {heads.num_heads, *(config.layer_heads or ())}:
                local_heads(replace(heads, num_heads=num_heads), world_size)
    for what, size in (config.divided or {}).items():
        divide(size, world_size, what)
    moe = config.moe
    if moe is None or moe.dense_layers:
        divide(config.intermediate_size, world_size, "the intermediate size")
    if moe is not None:
        if moe.shared_size:
            divide(moe.shared_size, world_size, "the intermediate size")
        divide_experts(moe, world_size, expert_parallel=expert_parallel)
