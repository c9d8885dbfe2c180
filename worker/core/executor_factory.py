"""Selects the executor by device and model."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence

from worker.config import EngineConfig
from worker.core.executor import Executor
from worker.models.config.model_config import load_model_config


def uses_cuda(config: EngineConfig) -> bool:
    """Whether the engine runs on CUDA devices, determined from device files without torch."""
    if config.device != "auto":
        return config.device == "cuda"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    # A container may have access to a GPU other than the first.
    return not hidden and bool(glob.glob("/dev/nvidia[0-9]*"))


def create_executor(
    config: EngineConfig, directory: str, *, spawn_peers: bool, host: str = ""
) -> Executor:
    """Creates the executor for the configured device and model.

    Many steps of a block-diffusion model wait for the device between rounds, which would block a
    scheduler in the same process. Rank 0's steps therefore run in a separate process, as on CPU.

    Args:
        config: the group's engine configuration.
        directory: the group's private folder.
        spawn_peers: whether to start the other ranks as child processes (offline use); otherwise
            the caller starts them, both on CPU and on CUDA.
        host: this node's address if the caller starts the ranks on several nodes, otherwise empty.
    """
    peers: Sequence[int] = range(1, config.tensor_parallel_size) if spawn_peers else ()
    if uses_cuda(config) and not _has_blocks(config):
        # Imported on demand: it imports torch, which a coordinator on CPU does not need.
        from worker.core.executor_local import LocalExecutor

        return LocalExecutor(config, directory, peers, host)
    from worker.core.executor_remote import ProcessExecutor

    return ProcessExecutor(config, directory, [0, *peers], host)


def _has_blocks(config: EngineConfig) -> bool:
    model = load_model_config(config.checkpoint, weights=False, pooling=config.pooling)
    return model.diffusion_size > 1
