"""Chooses the executor by device and model."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence

from worker.config import EngineConfig
from worker.core.executor import Executor
from worker.models.config.model_config import load_model_config


def uses_cuda(config: EngineConfig) -> bool:
    """Whether the engine runs on CUDA devices; looks at the driver's device files, not at torch."""
    if config.device != "auto":
        return config.device == "cuda"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    # A container may be given another GPU's file than the first one's.
    return not hidden and bool(glob.glob("/dev/nvidia[0-9]*"))


def create_executor(
    config: EngineConfig, directory: str, *, spawn_peers: bool, host: str = ""
) -> Executor:
    """The executor for this configuration's device and model.

    Steps of a block-diffusion model wait for the device between rounds, and would block a scheduler
    in the same process: as on CPU, rank 0's step gets a process of its own.

    Args:
        config: the group's engine configuration.
        directory: the group's private folder.
        spawn_peers: start ranks 1 and up as child processes (offline use); otherwise the caller
            starts them, on CPU and CUDA alike.
        host: this node's address where the caller starts them on several nodes, else empty.
    """
    peers: Sequence[int] = range(1, config.tensor_parallel_size) if spawn_peers else ()
    if uses_cuda(config) and not _has_blocks(config):
        # Imported on demand: brings torch, which a coordinator on CPU does without.
        from worker.core.executor_local import LocalExecutor

        return LocalExecutor(config, directory, peers, host)
    from worker.core.executor_remote import ProcessExecutor

    return ProcessExecutor(config, directory, [0, *peers], host)


def _has_blocks(config: EngineConfig) -> bool:
    return load_model_config(config.checkpoint, weights=False).block_size > 1
