"""Brings one rank up, and tells how long each phase of that took."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import torch

from worker.config import EngineConfig
from worker.metrics.rank import answer_scrapes
from worker.models.config import load_model_config
from worker.models.tensor_parallel import TensorParallelGroup
from worker.plan.messages import Hello, Ready, Start
from worker.rank.runner import ModelRunner


class RankStartup:
    """What a rank does before its first Plan: `load`, `hello`, `allocate`, in this order.

    Phases, in seconds: connect (until all ranks have met), download (of a Hub model; nothing where
    it is there), load_weights, profile (one largest step, in which kernels are compiled), capture
    (KV cache and CUDA graphs). Waiting for the other ranks between them counts nowhere.

    Args:
        config: the group's engine configuration.
        clock: in seconds; `connect` begins when this object is made.
    """

    def __init__(self, config: EngineConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._began = clock()
        self._seconds: dict[str, float] = {}

    def load(self, group: TensorParallelGroup) -> ModelRunner:
        """The rank's shard, once the group has met. Raises ValueError as ModelRunner does."""
        config = self._config
        self._ends("connect")
        model = load_model_config(config.checkpoint, weights=config.load_format != "dummy")
        self._ends("download")
        runner = ModelRunner(config, group, model)
        self._ends("load_weights")
        return runner

    def hello(self, runner: ModelRunner) -> Hello:
        """What the rank has room for. Raises ValueError where that is nothing."""
        hello = runner.hello()
        self._ends("profile")
        return msgspec.structs.replace(
            hello,
            device=runner.device.type,
            dtype=str(runner.dtype).removeprefix("torch."),
            startup=dict(self._seconds),
        )

    def allocate(self, runner: ModelRunner, start: Start) -> Ready:
        """Makes what the coordinator asks for; on CUDA, tells scrapes of the device from then."""
        self._began = self._clock()
        self._seconds.clear()
        runner.allocate(start.num_pages, start.num_host_pages)
        self._ends("capture")
        if runner.device.type == "cuda":
            answer_scrapes(runner.group.rank, lambda: torch.cuda.mem_get_info(runner.device))
        return Ready(rank=runner.group.rank, startup=dict(self._seconds))

    def _ends(self, phase: str) -> None:
        now = self._clock()
        self._seconds[phase] = now - self._began
        self._began = now
