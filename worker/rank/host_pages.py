"""Host pages: one rank's host-memory tier of the KV cache, and copies between it and the device."""

from __future__ import annotations

import logging
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from typing import NamedTuple

import torch

from worker.plan.plan import PageCopies, Plan
from worker.rank.cpu import lazy_zeros
from worker.rank.host_states import HostStates
from worker.rank.pinning import PinnedRows
from worker.rank.states import RequestStates
from worker.rank.streams import NUM_SLOTS, DeviceStreams
from worker.rank.transfer import to_device

logger = logging.getLogger(__name__)

_STAGED_BYTES = 32 << 20
"""Maximum size, in bytes, of a staging buffer on the device and of a piece of a load."""
_PIECE_BYTES = 1 << 20
"""Maximum size, in bytes, of a piece of a load on CPU: copying it takes a fraction of a
millisecond."""
_MIN_S = 5e-4
"""Minimum time, in seconds, for which each Plan continues loads."""
_MAX_S = 0.1
"""Maximum time, in seconds, for which each Plan continues loads, however long ago the previous Plan
was: the rank may have been idle since."""


@dataclass(slots=True, eq=False)
class Loads:
    """A Plan's loads from host memory, which are copied in pieces."""

    seq: int
    """Sequence number of the Plan."""
    pieces: Iterator[None]
    """Iterator that copies one piece per iteration or, on CUDA, launches its copy."""
    is_launched: bool = False
    """Whether all pieces have been copied or, on CUDA, launched."""
    awaited: int = 0
    """Sequence number of the Plan whose rows wait for the loads; 0 if no rows do."""
    ms: float = 0.0
    """Milliseconds spent copying pieces on CPU."""
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    """Events on CUDA before and after pieces that were launched together."""

    def run(self, until: float) -> None:
        """Copies at least one piece, then continues until `time.monotonic()` reaches `until`."""
        while not self.is_launched:
            self.is_launched = next(self.pieces, True) is not None
            if time.monotonic() >= until:
                return


class HostPages(ABC):
    """Slots in host memory, each for the content of one page on this rank (all layers and planes),
    and snapshots of states if the model has any.

    Stores are copied before a Plan's rows. Loads are copied in pieces, in the order of the Plans,
    if possible while rows that do not read them are computed:

        Plan N loads    Plan N+1      Plan N+2      Plan N+3 (loaded = N)
        piece │ rows    piece │ rows  piece │ rows  the rest │ rows that read them

    Each Plan copies pieces for a fraction of the time since the previous Plan, so that loads delay
    steps by no more than this fraction.

    Args:
        num_slots: number of slots.
        planes: tensors of all pages (`allocate_planes`).
    """

    _SHARE = 0.25
    """Fraction of the time between Plans that loads may take."""

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
        self._unawaited: deque[Loads] = deque()
        """Loads for which no rows have waited, in the order of their Plans."""
        self._unreported: deque[Loads] = deque()
        """Loads whose completion has not been reported, in the order of their Plans."""
        self._ended_ms = 0.0
        """Milliseconds of loads that have completed since the last report."""
        self._last_plan_s = -inf

    def copy(self, plan: Plan) -> None:
        """Makes a Plan's copies before anything else in the step: all of its stores, and the loads
        that its rows read (`Plan.loaded`). Then continues other loads for a limited time."""
        now = time.monotonic()
        until = now + min(max(_MIN_S, self._SHARE * (now - self._last_plan_s)), _MAX_S)
        self._last_plan_s = now
        if self._unawaited:
            self._finish(plan, min(plan.loaded, plan.seq - 1))
        if plan.stores is not None or plan.host_state_stores is not None:
            self._store(plan)
        if plan.loads is not None or plan.host_state_loads is not None:
            self._count_ended(plan.seq - 1 - NUM_SLOTS)
            loads = Loads(plan.seq, self._pieces(plan))
            self._unawaited.append(loads)
            self._unreported.append(loads)
        if self._unawaited:
            self._finish(plan, plan.loaded)
            for loads in self._unawaited:
                if not loads.is_launched:
                    self._run(loads, until)
                if not loads.is_launched:
                    break

    def take_ended(self, seq: int) -> tuple[float, int]:
        """Milliseconds of the loads that have completed since the last call, and the first Plan
        whose loads have not completed (0 if there is none). Called on rank 0.

        Args:
            seq: sequence number of the last completed step.
        """
        if not self._unreported and not self._ended_ms:
            return 0.0, 0
        self._count_ended(seq)
        ms, self._ended_ms = self._ended_ms, 0.0
        return ms, self._unreported[0].seq if self._unreported else 0

    def start(self) -> None:
        """Starts background work, if there is any; called at the end of startup."""
        return

    def add_states(self, states: RequestStates, num_snapshots: int) -> None:
        """Adds `num_snapshots` snapshots in host memory."""
        self.states = HostStates(num_snapshots, states)

    @abstractmethod
    def _store(self, plan: Plan) -> None:
        """Copies a Plan's stores."""

    @abstractmethod
    def _pieces(self, plan: Plan) -> Iterator[None]:
        """Copies a Plan's loads, one piece per iteration."""

    @abstractmethod
    def _run(self, loads: Loads, until: float) -> None:
        """Copies at least one piece of loads, then continues until `time.monotonic()` reaches
        `until`."""

    @abstractmethod
    def _wait(self, loads: Loads) -> None:
        """Makes all later work wait for loads, all of whose pieces have been copied or launched."""

    @abstractmethod
    def _elapsed_ms(self, loads: Loads, seq: int) -> float | None:
        """Milliseconds of loads if they have completed, given the last completed step; otherwise
        None."""

    def _finish(self, plan: Plan, seq: int) -> None:
        """Makes `plan` wait for the loads of all Plans up to `seq`, after copying or launching
        their remaining pieces."""
        while self._unawaited and self._unawaited[0].seq <= seq:
            loads = self._unawaited.popleft()
            if not loads.is_launched:
                self._run(loads, inf)
            loads.awaited = plan.seq
            self._wait(loads)

    def _count_ended(self, seq: int) -> None:
        while self._unreported:
            ms = self._elapsed_ms(self._unreported[0], seq)
            if ms is None:
                return
            self._ended_ms += ms
            self._unreported.popleft()

    def _state_pieces(self, plan: Plan) -> Iterator[None]:
        copies = plan.host_state_loads
        if self.states is not None and copies is not None:
            for slot, number in zip(copies.pages, copies.slots, strict=True):
                self.states.load(PageCopies([slot], [number]))
                yield


class CPUHostPages(HostPages):
    """Host pages on CPU, copied from memory to memory before the rows of each step."""

    def _store(self, plan: Plan) -> None:
        if plan.stores is not None:
            self._store_pages(plan.stores)
        if self.states is not None and plan.host_state_stores is not None:
            self.states.store(plan.host_state_stores)

    def _store_pages(self, copies: PageCopies) -> None:
        pages, slots = torch.tensor(copies.pages), torch.tensor(copies.slots)
        for plane, part in self._planes:
            self.slots[:, part].index_copy_(0, slots, plane.index_select(0, pages))

    def _pieces(self, plan: Plan) -> Iterator[None]:
        size = max(1, _PIECE_BYTES // (self.slots[0].numel() * self.slots.itemsize))
        if plan.load_stores is not None:
            for pages, slots in _batches(plan.load_stores, size):
                self._store_pages(PageCopies(pages, slots))
                yield
        if plan.loads is not None:
            for pages, slots in _batches(plan.loads, size):
                to, source = torch.tensor(pages), torch.tensor(slots)
                for plane, part in self._planes:
                    plane.index_copy_(0, to, self.slots[:, part].index_select(0, source))
                yield
        yield from self._state_pieces(plan)

    def _run(self, loads: Loads, until: float) -> None:
        started = time.perf_counter()
        loads.run(until)
        loads.ms += (time.perf_counter() - started) * 1e3

    def _wait(self, loads: Loads) -> None:
        return

    def _elapsed_ms(self, loads: Loads, seq: int) -> float | None:
        return loads.ms if loads.is_launched else None


class CUDAHostPages(HostPages):
    """Host pages in pinned memory, copied on two separate streams while earlier steps compute.

        store    │ stores N │               │ stores N+1 │
        load                │ loads N … pieces while steps are computed …
        compute  … step N-1 ─│ step N ───────────────│ step N+1 …

    A slot is contiguous, so that it crosses the bus in one transfer; kernels gather its parts from
    the layers and scatter them to the layers through staging buffers on the device.

    HAZARD(stream): copies do not wait for the compute stream. This is safe because the scheduler
    only stores and loads pages that no step in flight accesses. The compute stream waits for all
    stores. Loads wait for the stores of their Plan and of all earlier Plans. Stores and rows wait
    for loads up to `Plan.loaded`; until then, the scheduler uses none of their slots and pages.

    Raises:
        ValueError: the host memory cannot be pinned.
    """

    _SHARE = 0.5

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
        self._streams = streams
        self._pinned: list[PinnedRows] = []
        self._pin(self.slots)
        slot_bytes = self.slots[0].numel() * self.slots.itemsize
        self._num_staged = max(1, min(num_slots, _STAGED_BYTES // slot_bytes))
        self._store_lane, self._load_lane = (self._lane() for _ in range(2))

    def start(self) -> None:
        """Pins the rest of the memory in the background."""
        for pinned in self._pinned:
            pinned.start()

    def add_states(self, states: RequestStates, num_snapshots: int) -> None:
        """Adds `num_snapshots` snapshots in pinned memory."""
        super().add_states(states, num_snapshots)
        assert self.states is not None
        self._pin(self.states.snapshots)

    def _lane(self) -> _Lane:
        stream = torch.cuda.Stream(self._streams.device)
        with torch.cuda.stream(stream):
            shape = (self._num_staged, *self.slots.shape[1:])
            return _Lane(
                stream, torch.empty(shape, dtype=self.slots.dtype, device=self._streams.device)
            )

    def _store(self, plan: Plan) -> None:
        with torch.cuda.stream(self._store_lane.stream):
            if plan.stores is not None:
                for pages, slots in _batches(plan.stores, self._num_staged):
                    self._store_pages(self._store_lane, pages, slots)
            if self.states is not None and plan.host_state_stores is not None:
                self.states.store(plan.host_state_stores)
        self._streams.compute.wait_stream(self._store_lane.stream)

    def _pieces(self, plan: Plan) -> Iterator[None]:
        self._load_lane.stream.wait_stream(self._store_lane.stream)
        if plan.load_stores is not None:
            for pages, slots in _batches(plan.load_stores, self._num_staged):
                self._store_pages(self._load_lane, pages, slots)
                yield
        if plan.loads is not None:
            for pages, slots in _batches(plan.loads, self._num_staged):
                self._load_pages(self._load_lane, pages, slots)
                yield
        yield from self._state_pieces(plan)

    def _run(self, loads: Loads, until: float) -> None:
        with torch.cuda.stream(self._load_lane.stream):
            started, stopped = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            started.record()
            loads.run(until)
            stopped.record()
        loads.events.append((started, stopped))

    def _wait(self, loads: Loads) -> None:
        _, stopped = loads.events[-1]
        self._streams.compute.wait_event(stopped)
        self._store_lane.stream.wait_event(stopped)

    def _elapsed_ms(self, loads: Loads, seq: int) -> float | None:
        if not loads.is_launched:
            return None
        is_awaited = 0 < loads.awaited <= seq
        if not is_awaited and not loads.events[-1][1].query():
            return None
        ms: float = sum(started.elapsed_time(stopped) for started, stopped in loads.events)
        return ms

    def _store_pages(self, lane: _Lane, pages: list[int], slots: list[int]) -> None:
        index = to_device(torch.tensor(pages), self._streams.device)
        for plane, part in self._planes:
            lane.staged[: len(pages), part].copy_(plane.index_select(0, index))
        for row, slot in enumerate(slots):
            self.slots[slot].copy_(lane.staged[row], non_blocking=True)

    def _load_pages(self, lane: _Lane, pages: list[int], slots: list[int]) -> None:
        index = to_device(torch.tensor(pages), self._streams.device)
        for row, slot in enumerate(slots):
            lane.staged[row].copy_(self.slots[slot], non_blocking=True)
        for plane, part in self._planes:
            plane.index_copy_(0, index, lane.staged[: len(pages), part])

    def _pin(self, tensor: torch.Tensor) -> None:
        try:
            pinned = PinnedRows(tensor, self._streams.device)
        except ValueError as error:
            if self._must_pin:
                raise
            logger.warning("%s; copies to and from host memory will be slower", error)
            return
        self._pinned.append(pinned)
        weakref.finalize(self, pinned.close).atexit = False


class _Lane(NamedTuple):
    """A stream for copies, and its staging buffer."""

    stream: torch.cuda.Stream
    staged: torch.Tensor
    """[pages of a batch, values of all planes] on the device."""


def create_host_pages(
    num_slots: int,
    planes: Sequence[torch.Tensor],
    streams: DeviceStreams | None,
    *,
    must_pin: bool = True,
) -> HostPages | None:
    """The host pages of one rank; None if there is no host-memory tier.

    Args:
        num_slots: number of pages in host memory; 0 if there is no tier.
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
    """Views of planes as [pages, values] of one dtype: uint8 if their dtypes differ, and for FP8,
    for which torch has no index_copy_."""
    rows = [plane.view(len(plane), -1) for plane in planes]
    types = {plane.dtype for plane in planes}
    if len(types) == 1 and rows[0].itemsize > 1:
        return rows
    return [plane.view(torch.uint8) for plane in rows]


def _batches(copies: PageCopies, size: int) -> Iterator[tuple[list[int], list[int]]]:
    """Pages and slots in batches of at most `size`."""
    for start in range(0, len(copies.pages), size):
        yield copies.pages[start : start + size], copies.slots[start : start + size]
