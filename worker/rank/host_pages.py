"""Host pages: one rank's host-memory tier of the KV cache, and copies between it and the device."""

from __future__ import annotations

import logging
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import torch

from worker.plan.plan import PageCopies, Plan
from worker.rank.cpu import lazy_zeros
from worker.rank.host_states import HostStates
from worker.rank.states import RequestStates
from worker.rank.streams import DeviceStreams
from worker.rank.transfer import to_device

logger = logging.getLogger(__name__)

_STAGED_BYTES = 32 << 20
"""Maximum bytes of the staging buffer on the device."""


LoadMs = Callable[[], float]
"""Returns the milliseconds that a step's loads took; call it once the step has completed."""


class HostPages(ABC):
    """Slots in host memory, each for the content of one page on this rank: all layers and planes;
    and snapshots of states, if the model has any.

    Args:
        num_slots: number of slots.
        planes: tensors of all pages (`allocate_planes`).
    """

    def __init__(self, num_slots: int, planes: Sequence[torch.Tensor]) -> None:
        rows = _rows(planes)
        ends = list(accumulate(plane.shape[1] for plane in rows))
        parts = [slice(end - plane.shape[1], end) for end, plane in zip(ends, rows, strict=True)]
        self._planes = list(zip(rows, parts, strict=True))
        """Planes, [pages, values] each, and their parts of a slot."""
        self.states: HostStates | None = None
        """Snapshots of states; None for models without states."""
        self.slots = lazy_zeros((num_slots, ends[-1]), rows[0].dtype)
        """[slots, values of all planes] in host memory."""

    def copy(self, plan: Plan) -> LoadMs | None:
        """Runs a Plan's copies, before anything else in the step; returns the time of its loads, or
        None without loads."""
        copies = (plan.stores, plan.loads, plan.host_state_stores, plan.host_state_loads)
        return None if copies == (None,) * 4 else self._copy(plan)

    def add_states(self, states: RequestStates, num_snapshots: int) -> None:
        """Adds `num_snapshots` snapshots in host memory."""
        self.states = HostStates(num_snapshots, states)

    @abstractmethod
    def _copy(self, plan: Plan) -> LoadMs | None: ...

    def _store_states(self, plan: Plan) -> None:
        if self.states is not None and plan.host_state_stores is not None:
            self.states.store(plan.host_state_stores)

    def _load_states(self, plan: Plan) -> None:
        if self.states is not None and plan.host_state_loads is not None:
            self.states.load(plan.host_state_loads)


class CPUHostPages(HostPages):
    """Host pages on CPU, copied from memory to memory within the step."""

    def _copy(self, plan: Plan) -> LoadMs | None:
        if plan.stores is not None:
            pages, slots = _indices(plan.stores)
            for plane, part in self._planes:
                self.slots[:, part].index_copy_(0, slots, plane.index_select(0, pages))
        self._store_states(plan)
        if plan.loads is None and plan.host_state_loads is None:
            return None
        started = time.perf_counter()
        if plan.loads is not None:
            pages, slots = _indices(plan.loads)
            for plane, part in self._planes:
                plane.index_copy_(0, pages, self.slots[:, part].index_select(0, slots))
        self._load_states(plan)
        elapsed_ms = (time.perf_counter() - started) * 1e3
        return lambda: elapsed_ms


class CUDAHostPages(HostPages):
    """Host pages in pinned memory, copied on a separate stream while the previous step computes.

        copy     │ stores N │ loads N │
        compute  … step N-1 ──────────│ step N …

    A slot is contiguous, so that it crosses the bus in one transfer; kernels gather its parts from
    the layers, and scatter them to the layers, via a staging buffer on the device.

    HAZARD(stream): copies do not wait for the compute stream. This is safe since the scheduler only
    stores and loads pages that no step in flight touches. Copies run in the order of the Plans,
    since several may touch a slot or a page, and the compute stream waits for all of them.

    Raises:
        ValueError: the host memory cannot be pinned.
    """

    def __init__(
        self,
        num_slots: int,
        planes: Sequence[torch.Tensor],
        streams: DeviceStreams,
        *,
        must_pin: bool,
    ) -> None:
        super().__init__(num_slots, planes)
        self._must_pin = must_pin
        self._pin(self.slots)
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

    def add_states(self, states: RequestStates, num_snapshots: int) -> None:
        """Adds `num_snapshots` snapshots in pinned memory."""
        super().add_states(states, num_snapshots)
        assert self.states is not None
        self._pin(self.states.snapshots)

    def _copy(self, plan: Plan) -> LoadMs | None:
        load_ms: LoadMs | None = None
        with torch.cuda.stream(self._stream):
            if plan.stores is not None:
                self._store(plan.stores)
            self._store_states(plan)
            if plan.loads is not None or plan.host_state_loads is not None:
                started, stopped = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                started.record()
                if plan.loads is not None:
                    self._load(plan.loads)
                self._load_states(plan)
                stopped.record()
                load_ms = partial(started.elapsed_time, stopped)
        self._streams.compute.wait_stream(self._stream)
        return load_ms

    def _pin(self, tensor: torch.Tensor) -> None:
        try:
            _pin(tensor)
        except ValueError as error:
            if self._must_pin:
                raise
            logger.warning("copies to and from host memory are slower: %s", error)
            return
        # Unpin with this object: the process's next engine may map and pin the same addresses.
        weakref.finalize(self, _unpin, tensor.data_ptr()).atexit = False

    def _store(self, copies: PageCopies) -> None:
        for pages, slots in self._batches(copies):
            index = to_device(torch.tensor(pages), self._streams.device)
            for plane, part in self._planes:
                self._staged[: len(pages), part].copy_(plane.index_select(0, index))
            for row, slot in enumerate(slots):
                self.slots[slot].copy_(self._staged[row], non_blocking=True)

    def _load(self, copies: PageCopies) -> None:
        for pages, slots in self._batches(copies):
            index = to_device(torch.tensor(pages), self._streams.device)
            for row, slot in enumerate(slots):
                self._staged[row].copy_(self.slots[slot], non_blocking=True)
            for plane, part in self._planes:
                plane.index_copy_(0, index, self._staged[: len(pages), part])

    def _batches(self, copies: PageCopies) -> list[tuple[list[int], list[int]]]:
        size = self._num_staged
        return [
            (copies.pages[start : start + size], copies.slots[start : start + size])
            for start in range(0, len(copies.pages), size)
        ]


def create_host_pages(
    num_slots: int,
    planes: Sequence[torch.Tensor],
    streams: DeviceStreams | None,
    *,
    must_pin: bool = True,
) -> HostPages | None:
    """The host pages of one rank; None without a host-memory tier.

    Args:
        num_slots: number of pages in host memory; 0 for no tier.
        planes: tensors of all pages.
        streams: the rank's streams; None on CPU.
        must_pin: whether memory that cannot be pinned is an error; otherwise, copies from and to it
            are slower.
    """
    if not num_slots:
        return None
    if streams is None:
        return CPUHostPages(num_slots, planes)
    return CUDAHostPages(num_slots, planes, streams, must_pin=must_pin)


def _rows(planes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Planes as [pages, values] of one type: bytes if types differ, and for FP8, since torch has no
    index_copy_ for it."""
    rows = [plane.view(len(plane), -1) for plane in planes]
    types = {plane.dtype for plane in planes}
    if len(types) == 1 and rows[0].itemsize > 1:
        return rows
    return [plane.view(torch.uint8) for plane in rows]


def _indices(copies: PageCopies) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(copies.pages), torch.tensor(copies.slots)


def _pin(tensor: torch.Tensor) -> None:
    """Pins a tensor's memory in place: torch would round pinned memory up to a power of two."""
    num_bytes = tensor.numel() * tensor.itemsize
    error = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), num_bytes, 0)
    if int(error):
        raise ValueError(
            f"failed to pin {num_bytes / 2**30:.1f} GiB of host memory (CUDA error {int(error)}): "
            "lower --host-cache-gib"
        )


def _unpin(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
