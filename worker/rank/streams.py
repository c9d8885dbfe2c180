"""Streams, events and buffers of steps on CUDA: a step is launched while the previous one runs.

    host       launch N+1 ─ wait N ─ launch N+2 ─ wait N+1 ─
    schedule      └─ inputs N+1         └─ inputs N+2
    compute    … step N ───────│ step N+1 ───────│ step N+2 …
    copy                       └─ tokens N       └─ tokens N+1

Inputs are copied from pinned memory on the schedule stream; the compute stream waits for them. All
accesses to the tables, the caches and the sampling state run on the compute stream, in the order of
steps, so that no write can overtake an earlier step's read. Sampled tokens are copied to pinned
memory on the copy stream, and the host sleeps until that copy's event is recorded.

HAZARD(stream): buffers that several streams use belong to a `StepSlot`. A slot is only reused once
its last step has completed, as signaled by the slot's last event.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from worker.rank.transfer import aligned

NUM_SLOTS = 3
"""Number of step slots: two steps may be in flight, and DeviceClock still reads the events of the
step before them."""

_LEAST_STAGING_BYTES = 1 << 16


class DeviceStreams:
    """CUDA streams of one rank, and its step slots."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.schedule, self.compute, self.copy = (torch.cuda.Stream(device) for _ in range(3))
        # Work on the default stream, such as loading weights, finishes before any of these starts.
        torch.cuda.synchronize(device)
        self._slots = itertools.cycle([StepSlot(self) for _ in range(NUM_SLOTS)])
        self.latest: StepSlot | None = None
        """The slot whose results were fetched last."""

    def take(self) -> StepSlot:
        """The next slot in turn, cleared. Waits for its last step, which has already completed if
        results are fetched in time."""
        slot = next(self._slots)
        slot.wait()
        slot.reset()
        return slot

    def await_fetches(self) -> None:
        """Makes the compute stream wait until all results so far have been copied from their
        buffers."""
        if self.latest is not None:
            self.latest.hold_back(self.compute)


class StepSlot:
    """Buffers and events of one step in flight."""

    def __init__(self, streams: DeviceStreams) -> None:
        self._streams = streams
        self._uploaded = torch.cuda.Event()
        self._host = torch.empty(0, dtype=torch.uint8)
        self._staged = torch.empty(0, dtype=torch.uint8)
        self._used = 0
        self._outgrown: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._fetched: list[torch.Tensor] = []
        self.events = tuple(torch.cuda.Event(enable_timing=True) for _ in range(4))
        self.started, self.prepared, self.forwarded, self.finished = self.events
        """Events on the compute stream: before the first launch of the step, before and after its
        forward pass, after its last launch."""
        # Blocking: the waiting thread sleeps instead of spinning.
        self._completed = torch.cuda.Event(blocking=True)
        self._is_pending = False

    def reset(self) -> None:
        """Empties the slot's buffers for a new step."""
        self._used = 0
        self._outgrown.clear()
        self._fetched.clear()

    def upload(self, num_bytes: int, fill: Callable[[npt.NDArray[np.uint8]], None]) -> torch.Tensor:
        """Copies bytes to the device on the schedule stream.

        Args:
            num_bytes: number of bytes.
            fill: writes the bytes to an array in pinned memory.

        Returns:
            uint8 [num_bytes] on the device, for use on the compute stream.
        """
        start = self._used
        if start + num_bytes > len(self._host):
            self._grow(num_bytes)
            start = 0
        self._used = start + aligned(num_bytes)
        host = self._host[start : start + num_bytes]
        staged = self._staged[start : start + num_bytes]
        fill(host.numpy())
        with torch.cuda.stream(self._streams.schedule):
            staged.copy_(host, non_blocking=True)
            self._uploaded.record()
        self._streams.compute.wait_event(self._uploaded)
        return staged

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Launches the copy of a result to pinned memory; `finish` must be called first.

        Returns:
            A tensor on the host that has the values after `wait` has returned.
        """
        # torch's cache only reuses pinned memory after the copies to it have completed.
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        with torch.cuda.stream(self._streams.copy):
            host.copy_(tensor, non_blocking=True)
        # HAZARD(stream): if freed now, its memory could go to the compute stream's next step.
        self._fetched.append(tensor)
        return host

    def finish(self) -> None:
        """Marks the step's last launch; results may then be fetched."""
        self.finished.record(self._streams.compute)
        self._streams.copy.wait_event(self.finished)

    def close(self) -> None:
        """Marks the last fetch: the slot may be reused once the copies have completed."""
        self._completed.record(self._streams.copy)
        self._is_pending = True
        self._streams.latest = self

    def hold_back(self, stream: torch.cuda.Stream) -> None:
        """Makes `stream` wait until the slot's results are on the host."""
        if self._is_pending:
            stream.wait_event(self._completed)

    def wait(self) -> bool:
        """Sleeps until the slot's step has completed and all its results are on the host.

        Returns:
            Whether it had to wait.
        """
        if not self._is_pending:
            return False
        waited = not self._completed.query()
        self._completed.synchronize()  # a failed step raises here
        self._is_pending = False
        return waited

    def _grow(self, num_bytes: int) -> None:
        if len(self._host):
            self._outgrown.append((self._host, self._staged))
        size = staging_size(num_bytes)
        self._host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        # HAZARD(stream): a block allocated on the compute stream could still be read there by its
        # last owner when the schedule stream fills it.
        with torch.cuda.stream(self._streams.schedule):
            self._staged = torch.empty(size, dtype=torch.uint8, device=self._streams.device)


def staging_size(num_bytes: int) -> int:
    """Size of a staging buffer for `num_bytes` bytes: a power of two, so that it rarely grows."""
    return max(_LEAST_STAGING_BYTES, 1 << (num_bytes - 1).bit_length())
