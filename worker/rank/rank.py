"""One rank of a worker group: its device and shard, and one step per Plan.

The rank's own process (`worker/rank/main.py`), or the scheduler in the same process as rank 0
(`worker/core/executor_local.py`), runs a step with these calls:

    Plan ──launch──> forward pass ──(Sample ──sample──>)── sampling ──result──> StepResult

Only `result` waits for a CUDA device, so the next Plan may be launched before it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import torch

from worker.config import EngineConfig
from worker.metrics.rank import answer_scrapes
from worker.models.config.model_config import load_model_config
from worker.models.layers.tensor_parallel import TensorParallelGroup
from worker.plan.messages import Hello, Ready, Start
from worker.plan.plan import Plan, StepResult
from worker.rank.diffusion.ahead import RoundAhead
from worker.rank.dtype import MIN_CAPABILITY
from worker.rank.guard import PlanGuard
from worker.rank.runner import ModelRunner
from worker.rank.steps import ForwardStep, SampledStep
from worker.rank.warmup import choose_kernel_cache


def select_device(config: EngineConfig, rank: int) -> torch.device:
    """The device of rank `rank`; a CUDA device becomes the calling thread's current device.

    Raises:
        ValueError: CUDA is requested but not available, or the device is too old.
    """
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise ValueError("--device cuda: no CUDA device is visible; use --device cpu")
    if config.device == "cpu" or not available:
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    properties = torch.cuda.get_device_properties(device)
    if (properties.major, properties.minor) < MIN_CAPABILITY:
        raise ValueError(
            f"{properties.name} has compute capability {properties.major}.{properties.minor}, but "
            f"kernels require at least {'.'.join(map(str, MIN_CAPABILITY))} (A100, A10, L4 or "
            "later): use another GPU, or --device cpu"
        )
    # Triton launches on the current device, and pinning memory creates a CUDA context on it.
    torch.cuda.set_device(device)
    return device


_LARGER_DEVICE = (
    "raise --tensor-parallel-size, use a smaller or quantized checkpoint, or stop other processes "
    "on the device"
)
_SMALLER_STEPS = "lower --max-num-batched-tokens or --max-num-seqs, or raise --tensor-parallel-size"
_SMALLER_CACHE = (
    "lower --gpu-memory-utilization or --kv-cache-tokens; other processes may have allocated "
    "device memory since the start"
)


@contextmanager
def _with_remedy(purpose: str, remedy: str) -> Iterator[None]:
    """Converts a CUDA out-of-memory error to a RuntimeError that names the options to change."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise _out_of_memory(error, purpose, remedy) from error


def _out_of_memory(error: torch.OutOfMemoryError, purpose: str, remedy: str) -> RuntimeError:
    return RuntimeError(f"{error}\nout of device memory {purpose}: {remedy}")


class Rank:
    """One rank: `load`, `allocate`, then `launch` (and `sample`) for each Plan, then `close`.

    Reports the duration of each startup phase in seconds: connect (until all ranks have joined),
    download (of a model from the Hub), load_weights, profile (the largest steps), capture (KV
    cache, compiled kernels, CUDA graphs). Waiting for the coordinator's Start is not counted.

    Args:
        config: the group's engine configuration.
        clock: returns seconds; `connect` begins when this object is created.
    """

    def __init__(self, config: EngineConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._phase_began = clock()
        self._seconds: dict[str, float] = {}
        self._group: TensorParallelGroup | None = None
        self._runner: ModelRunner | None = None
        self._guard: PlanGuard | None = None
        """Compares this rank with the others; None if there is only one rank."""
        self._unsampled: RankStep | None = None
        """The last launched step while it waits for masks; otherwise None."""

    @property
    def runner(self) -> ModelRunner:
        """The runner of the loaded model."""
        assert self._runner is not None, "the model is not loaded"
        return self._runner

    def load(self, group: TensorParallelGroup) -> Hello:
        """Loads the shard; returns the rank's Hello, with the number of pages that fit in memory.

        Raises:
            ValueError: the checkpoint cannot be served with this configuration, or there is not
                enough memory for one page.
            RuntimeError: the device is out of memory; the message names the options to change.
        """
        config, self._group = self._config, group
        self._guard = PlanGuard() if group.world_size > 1 else None
        self._end_phase("connect")
        if group.device.type == "cuda":
            choose_kernel_cache()
        model = load_model_config(
            config.checkpoint, weights=config.load_format != "dummy", pooling=config.pooling
        )
        self._end_phase("download")
        with _with_remedy("for the weights", _LARGER_DEVICE):
            runner = self._runner = ModelRunner(config, group, model)
        self._end_phase("load_weights")
        with _with_remedy("for the largest step", _SMALLER_STEPS):
            hello = runner.hello()
        self._end_phase("profile")
        return msgspec.structs.replace(
            hello,
            device=runner.device.type,
            dtype=str(runner.dtype).removeprefix("torch."),
            kv_cache_dtype="" if runner.cache_dtype is None else "fp8_e4m3",
            startup=dict(self._seconds),
        )

    def allocate(self, start: Start) -> Ready:
        """Allocates the KV cache with the coordinator's number of pages. On CUDA, also starts
        serving this rank's metrics."""
        runner = self.runner
        self._phase_began = self._clock()
        self._seconds.clear()
        with _with_remedy("for KV cache and CUDA graphs", _SMALLER_CACHE):
            runner.allocate(start.num_pages, start.num_host_pages)
        self._end_phase("capture")
        if runner.device.type == "cuda":
            answer_scrapes(runner.group.rank, lambda: torch.cuda.mem_get_info(runner.device))
        return Ready(rank=runner.group.rank, startup=dict(self._seconds))

    def launch(self, plan: Plan) -> RankStep:
        """Launches a step: completely, or, if its Plan has masked rows, up to the forward pass.

        Raises:
            OutOfStep: a Plan was missed, or the ranks have sampled different tokens.
            RuntimeError: the device is out of memory; the message names the options to change.
        """
        assert self._unsampled is None, "got a Plan before the masks of the previous one"
        assert self._runner is not None, "the model is not loaded"
        if self._guard is not None:
            self._guard.check(plan)
        try:
            step = RankStep(self._runner.forward(plan), self._guard)
        except torch.OutOfMemoryError as error:
            raise _out_of_memory(error, "for a step", _SMALLER_CACHE) from error
        if plan.masked:
            self._unsampled = step
        else:
            self._sample(step, b"")
        return step

    def drafts(self, seq: int) -> list[list[int]]:
        """Drafts of each masked row of step `seq`, which waits for masks."""
        step = self._unsampled
        assert step is not None, f"step {seq} does not wait for masks"
        assert step.seq == seq, f"drafts of step {seq}, but step {step.seq} waits for masks"
        return step.forwarded.masked_drafts()

    def sample(self, seq: int, masks: bytes) -> RankStep:
        """Launches the sampling of step `seq`, which waits for masks; `masks` as in a Sample
        message."""
        step, self._unsampled = self._unsampled, None
        assert step is not None, f"masks of step {seq}, but no step waits for masks"
        assert step.seq == seq, f"masks of step {seq}, but step {step.seq} waits for masks"
        self._sample(step, masks)
        return step

    def close(self) -> bool:
        """Drops the model and closes the group, waiting a few seconds. Safe to call twice.

        Returns:
            Whether the group has closed.
        """
        if self._runner is not None:
            self._runner.close()  # graphs contain collectives: the group must outlive them
            self._runner = None
        group, self._group = self._group, None
        return group is None or group.close()

    def _sample(self, step: RankStep, masks: bytes) -> None:
        assert self._runner is not None, "the model is not loaded"
        try:
            step.sampled = self._runner.sample(step.forwarded, masks)
        except torch.OutOfMemoryError as error:
            raise _out_of_memory(error, "for sampling", _SMALLER_CACHE) from error
        step.is_ahead = isinstance(step.sampled.blocks, RoundAhead)
        if self._guard is not None and self._runner.group.rank:
            self._guard.follow(step.sampled)

    def _end_phase(self, phase: str) -> None:
        now = self._clock()
        self._seconds[phase] = now - self._phase_began
        self._phase_began = now


@dataclass(slots=True)
class RankStep:
    """A step in flight."""

    forwarded: ForwardStep
    """The step up to its forward pass."""
    guard: PlanGuard | None
    """The rank's guard; None if there is only one rank."""
    sampled: SampledStep | None = None
    """The step including sampling; None while it waits for masks."""
    is_ahead: bool = False
    """Whether the step is a round ahead, which was launched without waiting for the device."""

    @property
    def seq(self) -> int:
        """Sequence number of the step's Plan."""
        return self.forwarded.plan.seq

    def result(self) -> StepResult:
        """The step's result; waits for the step. Must be called on rank 0, once per step, in launch
        order.

        Raises:
            RuntimeError: the device failed.
        """
        assert self.sampled is not None, f"step {self.seq} still waits for masks"
        result = self.sampled.result()
        if self.guard is not None:
            self.guard.record(result)
        return result
