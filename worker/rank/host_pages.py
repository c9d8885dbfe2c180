"""One rank's pages in host memory, and the copies between them and the device's."""

from __future__ import annotations

import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import torch

from worker.models.context import KVCache
from worker.plan.plan import PageCopies, Plan
from worker.rank.cpu import lazy_zeros
from worker.rank.streams import DeviceStreams
from worker.rank.transfer import to_device

_STAGED_BYTES = 32 << 20
"""Most bytes on the device between its pages and host memory."""


LoadMs = Callable[[], float]
"""Milliseconds that all loads of a step took; to be asked once the step has completed."""


class HostPages(ABC):
    """A slot holds what one page has in all layers and planes, on this rank.

    Args:
        num_slots: how many there are.
        caches: of the layers; all pages are equally large.
    """

    def __init__(self, num_slots: int, caches: Sequence[KVCache]) -> None:
        self._planes = [t.view(len(t), -1) for cache in caches for t in cache.planes]
        """[pages, values] each."""
        first = self._planes[0]
        self.slots = lazy_zeros((num_slots, len(self._planes), first.shape[1]), first.dtype)
        """[slots, planes, values]."""

    def copy(self, plan: Plan) -> LoadMs | None:
        """Makes a Plan's copies, before anything else of it; None where it loads nothing."""
        if plan.stores is None and plan.loads is None:
            return None
        return self._copy(plan)

    @abstractmethod
    def _copy(self, plan: Plan) -> LoadMs | None: ...


class CPUHostPages(HostPages):
    """Copies within the step, from memory to memory."""

    def _copy(self, plan: Plan) -> LoadMs | None:
        if plan.stores is not None:
            pages, slots = _indices(plan.stores)
            for number, plane in enumerate(self._planes):
                self.slots[:, number].index_copy_(0, slots, plane.index_select(0, pages))
        if plan.loads is None:
            return None
        started = time.perf_counter()
        pages, slots = _indices(plan.loads)
        for number, plane in enumerate(self._planes):
            plane.index_copy_(0, pages, self.slots[:, number].index_select(0, slots))
        elapsed_ms = (time.perf_counter() - started) * 1e3
        return lambda: elapsed_ms


class CUDAHostPages(HostPages):
    """Copies on a stream of their own, while the step before computes.

        copy     │ stores N │ loads N │
        compute  … step N-1 ──────────│ step N …

    A slot is one block of pinned memory, so that it crosses in one transfer; kernels gather its
    parts from the layers and scatter them.

    HAZARD(stream): nothing here waits for the compute stream. The host knows that all steps which
    touched these pages have completed: only such are stored or loaded into. Copies are made one
    after another in the order of the Plans, since a slot or a page may be in several; the compute
    stream waits for all of them.

    Raises:
        ValueError: so much host memory cannot be pinned.
    """

    def __init__(self, num_slots: int, caches: Sequence[KVCache], streams: DeviceStreams) -> None:
        super().__init__(num_slots, caches)
        _pin(self.slots)
        # The same memory may be mapped, and pinned, for the next engine of this process.
        weakref.finalize(self, _unpin, self.slots.data_ptr()).atexit = False
        self._streams = streams
        self._stream = torch.cuda.Stream(streams.device)
        slot_bytes = self.slots[0].numel() * self.slots.itemsize
        self._num_staged = max(1, min(num_slots, _STAGED_BYTES // slot_bytes))
        with torch.cuda.stream(self._stream):
            self._staged = torch.empty(
                (self._num_staged, *self.slots.shape[1:]),
                dtype=self.slots.dtype,
                device=streams.device,
            )

    def _copy(self, plan: Plan) -> LoadMs | None:
        load_ms: LoadMs | None = None
        with torch.cuda.stream(self._stream):
            if plan.stores is not None:
                self._store(plan.stores)
            if plan.loads is not None:
                started, stopped = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                started.record()
                self._load(plan.loads)
                stopped.record()
                load_ms = partial(started.elapsed_time, stopped)
        self._streams.compute.wait_stream(self._stream)
        return load_ms

    def _store(self, copies: PageCopies) -> None:
        for pages, slots in self._batches(copies):
            index = to_device(torch.tensor(pages), self._streams.device)
            for number, plane in enumerate(self._planes):
                self._staged[: len(pages), number].copy_(plane.index_select(0, index))
            for row, slot in enumerate(slots):
                self.slots[slot].copy_(self._staged[row], non_blocking=True)

    def _load(self, copies: PageCopies) -> None:
        for pages, slots in self._batches(copies):
            index = to_device(torch.tensor(pages), self._streams.device)
            for row, slot in enumerate(slots):
                self._staged[row].copy_(self.slots[slot], non_blocking=True)
            for number, plane in enumerate(self._planes):
                plane.index_copy_(0, index, self._staged[: len(pages), number])

    def _batches(self, copies: PageCopies) -> list[tuple[list[int], list[int]]]:
        size = self._num_staged
        return [
            (copies.pages[start : start + size], copies.slots[start : start + size])
            for start in range(0, len(copies.pages), size)
        ]


def create_host_pages(
    num_slots: int, caches: Sequence[KVCache], streams: DeviceStreams | None
) -> HostPages | None:
    """The host pages of one rank; None where there are to be none.

    Args:
        num_slots: pages in host memory.
        caches: of the layers.
        streams: of the device; None on CPU.
    """
    if not num_slots:
        return None
    if streams is None:
        return CPUHostPages(num_slots, caches)
    return CUDAHostPages(num_slots, caches, streams)


def _indices(copies: PageCopies) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(copies.pages), torch.tensor(copies.slots)


def _pin(tensor: torch.Tensor) -> None:
    """Pins memory where it lies: what torch allocates pinned is rounded up to a power of two."""
    num_bytes = tensor.numel() * tensor.itemsize
    error = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), num_bytes, 0)
    if int(error):
        raise ValueError(
            f"{num_bytes / 2**30:.1f} GiB of host memory cannot be pinned (CUDA error "
            f"{int(error)}): lower --host-cache-gib"
        )


def _unpin(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
