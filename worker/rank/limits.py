"""Default limits of a step by device: maximum numbers of running requests and of tokens."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import NamedTuple

import torch

from worker.config import EngineConfig
from worker.models.layers.tensor_parallel import TensorParallelGroup

logger = logging.getLogger(__name__)


class StepLimits(NamedTuple):
    """Limits on running requests and on one step."""

    max_num_seqs: int
    max_num_batched_tokens: int


# The defaults of vLLM's server (EngineArgs.get_batch_defaults), so that settings carry over. vLLM
# does not treat A100s as large GPUs either: long steps made them slower (vLLM's pull request
# 17885).
_LARGE_GPU = StepLimits(1024, 8192)
_GPU = StepLimits(256, 2048)
_CPU = StepLimits(64, 1024)
_LARGE_BYTES = 70 << 30
_STATE_SHARE = 0.2
"""Default maximum fraction of a GPU's memory for the states of running requests. States of Qwen3.5
take 20 to 60 MB per request: as much as the pages of a few thousand tokens."""


def resolve_limits(
    config: EngineConfig, group: TensorParallelGroup, *, state_bytes: int
) -> EngineConfig:
    """The configuration with all limits set, the same on all ranks.

    Args:
        config: the engine's configuration, in which limits may be unset.
        state_bytes: bytes of a request's state in linear-attention layers on this rank, which is
            allocated `max_num_seqs` times: the default leaves memory for weights and pages.
        group: the ranks, all of which must call this, since their GPUs may differ.
    """
    given = config.scheduling
    if given.max_num_seqs and given.max_num_batched_tokens:
        return config
    limits = _limits(group)
    if state_bytes and not given.max_num_seqs and group.device.type == "cuda":
        most = _fitting_states(limits.max_num_seqs, state_bytes, group)
        limits = limits._replace(max_num_seqs=most)
    resolved = config.with_limits(*limits)
    if group.rank == 0:
        logger.info(
            "using max_num_seqs=%d, max_num_batched_tokens=%d",
            resolved.scheduling.max_num_seqs,
            resolved.scheduling.max_num_batched_tokens,
        )
    return resolved


def with_whole_prompts(config: EngineConfig, max_model_len: int, given: int) -> EngineConfig:
    """The configuration for a bidirectional encoder, which computes each prompt in one step: a step
    must have room for the longest one.

    Args:
        config: the configuration with all limits set.
        max_model_len: maximum number of tokens of a prompt.
        given: the user's `max_num_batched_tokens`; 0 for the default.

    Raises:
        ValueError: `given` is less than `max_model_len`.
    """
    if 0 < given < max_model_len:
        raise ValueError(
            f"--max-num-batched-tokens {given} must be at least {max_model_len} for this encoder, "
            "which computes a prompt in one step: raise it, or lower --max-model-len"
        )
    tokens = max(config.scheduling.max_num_batched_tokens, max_model_len)
    return replace(config, scheduling=replace(config.scheduling, max_num_batched_tokens=tokens))


def _fitting_states(most: int, state_bytes: int, group: TensorParallelGroup) -> int:
    """The largest number among `most`, half of it, and so on down to 1, whose states fit their
    share of the memory of each rank's GPU."""
    total = torch.cuda.get_device_properties(group.device).total_memory
    counts = [most >> halvings for halvings in range(most.bit_length())]
    fits = [float(count * state_bytes <= _STATE_SHARE * total) for count in counts]
    votes = group.all_reduce(torch.tensor(fits, device=group.device)).tolist()
    fitting = (
        count for count, vote in zip(counts, votes, strict=True) if int(vote) == group.world_size
    )
    return next(fitting, 1)


def limits_of_gpu(name: str, num_bytes: int) -> StepLimits:
    """Default limits of a step on a GPU, given its name and its memory in bytes."""
    is_large = num_bytes >= _LARGE_BYTES and "a100" not in name.lower()
    return _LARGE_GPU if is_large else _GPU


def _limits(group: TensorParallelGroup) -> StepLimits:
    if group.device.type == "cpu":
        return _CPU
    properties = torch.cuda.get_device_properties(group.device)
    limits = limits_of_gpu(properties.name, properties.total_memory)
    votes = group.all_reduce(torch.full((1,), float(limits is _LARGE_GPU), device=group.device))
    return _LARGE_GPU if int(votes) == group.world_size else _GPU
