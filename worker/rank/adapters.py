"""LoRA adapters of a rank: host copies, which are read in the background, and slots on the device.

    AdapterRead ──(thread)──> host copy ──AdapterLoad──> slot on the device ──> rows (Admit.adapter)

The Plan determines which adapters are in host memory and on the device. Loads are queued on the
compute stream before the rows of their step, and after those of earlier steps.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Collection, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from kernels.lora import LoraTiles
from kernels.native import LORA_TYPES, NativeUnavailable, build_library
from worker.config import LoraConfig
from worker.models.architectures.decoder import DecoderModel
from worker.models.config.adapter_version import adapter_version
from worker.models.loading.adapters import Adapter, ModelAdapters
from worker.plan.plan import AdapterRead, AdapterReadResult, Plan
from worker.rank.adapter_rows import adapter_tiles
from worker.rank.batch import Batch

logger = logging.getLogger(__name__)

IDLE_S = 0.02
"""Maximum time, in seconds, that a Plan without rows waits for a read. A request that arrives
meanwhile is delayed by up to this time."""


class RankAdapters:
    """Adapters of one rank. Must be created before the weights are loaded, since layers with
    adapters do not fuse the quantization of their inputs.

    Args:
        model: the model; its layers get buffers for the adapters.
        config: LoRA options, such as the number and rank of adapters.
        is_native: whether the compiled CPU library may compute the LoRA matmuls.
    """

    def __init__(self, model: DecoderModel, config: LoraConfig, *, is_native: bool) -> None:
        self._adapters = ModelAdapters(
            model,
            max_loras=config.max_loras,
            max_rank=config.max_lora_rank,
            is_native=is_native and _has_library(model),
            with_vocabulary=config.embeddings,
        )
        device = model.options.device
        self._reader = ThreadPoolExecutor(
            1, thread_name_prefix="adapters", initializer=partial(_use_device, device)
        )
        self._copies: dict[int, Future[Adapter]] = {}
        """Host copies by key, some of which are still being read."""
        self._ended: deque[AdapterReadResult] = deque()
        """Reads that have ended and have not been reported yet."""

    @property
    def modules(self) -> Collection[str]:
        """Projections that may have adapters, under the names that the model family uses."""
        return self._adapters.modules

    @property
    def num_bytes(self) -> int:
        """Size of the buffers on the device, in bytes."""
        return self._adapters.num_bytes

    def apply(self, plan: Plan) -> None:
        """Starts the Plan's reads, queues its loads, and drops copies. Waits until the adapters to
        load have been read and, if the Plan has no rows, up to IDLE_S for any read.

        Raises:
            ValueError: an adapter to load could not be read.
        """
        for read in plan.adapter_reads:
            self._copies[read.key] = self._reader.submit(self._read, read)
        for load in plan.adapter_loads:
            self._adapters.load(load.slot, self._copies[load.key].result())
        for key in plan.adapter_drops:
            self._copies.pop(key, None)
        if not plan.rows:
            reading = [copy for copy in self._copies.values() if not copy.done()]
            wait(reading, timeout=IDLE_S, return_when=FIRST_COMPLETED)

    @property
    def changes_logits(self) -> bool:
        """Whether the LM head may have adapters."""
        vocabulary = self._adapters.vocabulary
        return vocabulary is not None and vocabulary.head_rows is not None

    @contextmanager
    def of(self, batch: Batch) -> Iterator[None]:
        """Context in which layers apply the adapters of a batch's tokens, for its forward pass."""
        if batch.has_adapters:
            assert batch.staged is not None, "the compiled library has no adapters"
            selected = batch.selected_adapters
            self._adapters.rows.set(
                adapter_tiles(batch.staged),
                int(batch.rows[:, 2].sum()),
                None if selected is None else adapter_tiles(selected),
            )
        try:
            yield
        finally:
            self._adapters.rows.set(None)

    @contextmanager
    def of_logits(self, tiles: LoraTiles | None, num_rows: int) -> Iterator[None]:
        """Context in which the LM head applies adapters to `num_rows` rows; `tiles` is None if no
        row has one."""
        vocabulary = self._adapters.vocabulary
        rows = None if vocabulary is None else vocabulary.head_rows
        if rows is None or tiles is None:
            yield
            return
        rows.set(tiles, num_rows)
        try:
            yield
        finally:
            rows.set(None)

    def take_ended(self) -> list[AdapterReadResult]:
        """Reads that have ended since the previous call."""
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def close(self) -> None:
        """Ends the reading thread after its current adapter."""
        self._reader.shutdown(wait=False, cancel_futures=True)

    @torch.inference_mode()
    def _read(self, read: AdapterRead) -> Adapter:
        """Reads an adapter, in the reading thread."""
        started, error = time.monotonic(), ""
        try:
            adapter = self._adapters.read(Path(read.folder))
            # Checked after the read, so that what was read is of this version, too.
            if read.version and adapter_version(Path(read.folder)) != read.version:
                raise ValueError(f"{read.folder} has changed: load the adapter again")
            size = f"{adapter.num_bytes / 1e6:.1f} MB"
            logger.info("loaded adapter %s: %s in %.2f s", read.folder, size, _since(started))
            return adapter
        except Exception as problem:  # reported to the coordinator
            error = str(problem) or type(problem).__name__
            raise
        finally:
            self._ended.append(AdapterReadResult(read.key, _since(started), error))


def _has_library(model: DecoderModel) -> bool:
    """Whether the compiled CPU library is available for a model's adapters."""
    options = model.options
    if options.device.type != "cpu" or options.dtype not in LORA_TYPES:
        return False
    try:
        build_library()
    except NativeUnavailable as error:
        logger.warning("falling back to torch for LoRA: %s", error)
        return False
    return True


def _since(started: float) -> float:
    return time.monotonic() - started


def _use_device(device: torch.device) -> None:
    """Selects the device in this thread, so that pinning memory does not initialize another one."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
