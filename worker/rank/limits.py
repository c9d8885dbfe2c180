"""Default limits of a step by device: maximum running requests and tokens."""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch

from worker.config import EngineConfig
from worker.models.config.model_config import ModelConfig
from worker.models.layers.tensor_parallel import TensorParallelGroup

logger = logging.getLogger(__name__)


class StepLimits(NamedTuple):
    """Limits of the running set and of one step."""

    max_num_seqs: int
    max_num_batched_tokens: int


# The defaults of vLLM's server (EngineArgs.get_batch_defaults), so that settings carry over. There
# A100s are not large GPUs either: long steps made them slower (vLLM's pull request 17885).
_LARGE_GPU = StepLimits(1024, 8192)
_GPU = StepLimits(256, 2048)
_CPU = StepLimits(64, 1024)
_LARGE_BYTES = 70 << 30


def resolve_limits(
    config: EngineConfig, model: ModelConfig, group: TensorParallelGroup
) -> EngineConfig:
    """The configuration with all limits set, the same on all ranks.

    Args:
        config: the engine's configuration, in which limits may be unset.
        model: the model's configuration; linear-attention layers need memory for a state per slot,
            so they have a lower default for requests.
        group: the ranks, all of which must call this, since their GPUs may differ.
    """
    if config.max_num_seqs and config.max_num_batched_tokens:
        return config
    limits = _limits(group)
    if model.linear_layers:
        limits = limits._replace(max_num_seqs=_CPU.max_num_seqs)
    resolved = config.with_limits(*limits)
    if group.rank == 0:
        logger.info(
            "max_num_seqs=%d, max_num_batched_tokens=%d",
            resolved.max_num_seqs,
            resolved.max_num_batched_tokens,
        )
    return resolved


def limits_of_gpu(name: str, num_bytes: int) -> StepLimits:
    """Default limits on a GPU with this name and this memory in bytes."""
    is_large = num_bytes >= _LARGE_BYTES and "a100" not in name.lower()
    return _LARGE_GPU if is_large else _GPU


def _limits(group: TensorParallelGroup) -> StepLimits:
    if group.device.type == "cpu":
        return _CPU
    properties = torch.cuda.get_device_properties(group.device)
    limits = limits_of_gpu(properties.name, properties.total_memory)
    votes = group.all_reduce(torch.full((1,), float(limits is _LARGE_GPU), device=group.device))
    return _LARGE_GPU if int(votes) == group.world_size else _GPU
