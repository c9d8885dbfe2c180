"""Happens-before analysis on a fake device: streams, events, the caching allocator, graphs.

Each stream, and the host, is a lane with a vector clock. Operations in different lanes are ordered
only if an event was recorded and waited for in between, or if the host launched one after observing
the other. Everything runs immediately and in order. Findings show where other orders are possible:

    a race        an unordered access to memory that one of them writes
    a free        memory is returned to the allocator while another stream may still use it
    a first use   a stream uses memory without waiting for the stream that owns it
    a wait        the host would block until the device has caught up
    a graph       contains operations that cannot be captured, or replays on freed memory

One run covers all orders. A finding names both source locations.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from tests.support.cuda.tensors import Launch, Memory, Region, StandIn, site

MAX_LANES = 32
_FINE_BYTES = 1 << 16
"""Memory up to this size is tracked in units of 4 bytes. Larger memory is tracked in the same
number of units."""

Clock = npt.NDArray[np.int64]


class Lane:
    """A stream, or the host."""

    def __init__(self, clocks: Clocks, name: str) -> None:
        self.name, self.clocks = name, clocks
        self.number = clocks.world.enter(self)
        self.clock: Clock = np.zeros(MAX_LANES, dtype=np.int64)

    def join(self, clock: Clock) -> None:
        """Orders later operations after those known to the clock."""
        np.maximum(self.clock, clock, out=self.clock)

    def tick(self) -> None:
        """Advances this lane's clock."""
        self.clock[self.number] += 1

    # Interface of torch.cuda.Stream.

    def wait_event(self, event: Event) -> None:
        self.join(self.clocks.host.clock)
        if event.clock is not None:
            self.join(event.clock)

    def wait_stream(self, other: Lane) -> None:
        self.join(self.clocks.host.clock)
        self.join(other.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self.clocks)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.clocks.waited("stream.synchronize", self)


class Event:
    """Fake of torch.cuda.Event; a query never reports it as complete."""

    def __init__(self, clocks: Clocks, *, enable_timing: bool = False) -> None:
        self._clocks, self._is_timed = clocks, enable_timing
        self.clock: Clock | None = None
        """Clock of the recording; None before it."""

    def record(self, stream: Lane | None = None) -> None:
        lane = stream or self._clocks.current
        if self._clocks.capture is not None:
            self._clocks.find("graph", f"an event is recorded in a capture at {site()}")
        lane.join(self._clocks.host.clock)
        lane.tick()
        self.clock = lane.clock.copy()

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        if self.clock is not None:
            self._clocks.host.join(self.clock)

    def elapsed_time(self, end_event: Event) -> float:
        for event in (self, end_event):
            if not event._is_timed:
                self._clocks.find("event", f"no time was recorded for what is read at {site()}")
            if event.clock is None or (event.clock > self._clocks.host.clock).any():
                self._clocks.find("event", f"the time of what may be to come is read at {site()}")
        return 0.25


@dataclass(eq=False, slots=True)
class _Uses:
    """Last use of an allocation by each lane, in the lane's clock."""

    lane: Lane | None
    """Stream that owns the memory in the allocator; None for host memory."""
    is_pooled: bool = False
    """Whether the memory belongs to graphs."""
    whole: Clock = field(default_factory=lambda: np.zeros((2, MAX_LANES), dtype=np.int64))
    """[read or written, lane]: uses of the whole allocation."""
    parts: npt.NDArray[np.int64] | None = None
    """[read or written, lane, unit]: uses of parts."""
    unit: int = 4
    num_lanes: int = 0
    """Number of lanes up to the last one that uses parts."""
    sites: dict[tuple[int, bool], str] = field(default_factory=dict)

    def latest(self, units: npt.NDArray[np.int64] | slice | None, is_write: int) -> Clock:
        """Time of each lane's last read or write of any of these units; None for all units."""
        own: Clock = self.whole[is_write]
        if self.parts is None:
            return own
        found = self.parts[is_write, : self.num_lanes]
        if units is not None:
            found = found[:, units]
        latest = own.copy()
        if found.size:
            np.maximum(own[: self.num_lanes], found.max(axis=1), out=latest[: self.num_lanes])
        return latest


class Clocks:
    """Lanes of one rank; observes the rank's tensors."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.host = Lane(self, "host")
        self.default = Lane(self, "the default stream")
        self.current = self.default
        self.capture: Graph | None = None
        self.num_launches = 0
        self._streams: list[Lane] = []

    def stream(self) -> Lane:
        """A new stream."""
        self._streams.append(Lane(self, f"stream {len(self._streams) + 1}"))
        return self._streams[-1]

    @contextmanager
    def on(self, lane: Lane | None) -> Iterator[None]:
        """Makes a stream the current one."""
        before, self.current = self.current, lane or self.current
        try:
            yield
        finally:
            self.current = before

    def synchronize(self) -> None:
        """Waits for all streams."""
        self.waited("synchronize", self.default, *self._streams)

    def find(self, kind: str, text: str) -> None:
        """Records a finding."""
        self.world.findings.setdefault(f"{kind}: {text}")

    # Interface of an observer.

    def allocated(self, memory: Memory) -> None:
        lane = self.current
        uses = memory.notes = _Uses(lane, self.capture is not None)
        uses.whole[1, lane.number] = lane.clock[lane.number]
        uses.sites[lane.number, True] = f"{memory.site} (made)"

    def freed(self, memory: Memory) -> None:
        uses: _Uses = memory.notes
        if self.world.is_over or uses.is_pooled or uses.lane is None:
            return
        known = np.maximum(uses.lane.clock, self.host.clock)
        latest = np.maximum(uses.latest(None, 0), uses.latest(None, 1))
        for number in np.nonzero(latest > known)[0].tolist():
            if number != uses.lane.number:
                lane = self.world.lanes[number].name
                where = uses.sites.get((number, True)) or uses.sites.get((number, False))
                self.find("free", f"made at {memory.site}, {lane} may use it at {where}")

    def launched(self, launch: Launch) -> None:
        if self.capture is not None:
            self.capture.add(launch)
            return
        self.num_launches += 1
        lane = self.current
        lane.join(self.host.clock)
        lane.tick()
        self._access(lane, launch)

    def touched(self, region: Region, *, write: bool) -> None:
        self.host.tick()
        reads, writes = ([], [region]) if write else ([region], [])
        self._access(self.host, Launch("the host", reads, writes))

    def waited(self, what: str, *lanes: Lane) -> None:
        if self.capture is not None:
            self.find("graph", f"{what} at {site()} in a capture")
        self.world.waits.setdefault(f"{what} at {site()}")
        for lane in lanes or (self.current,):
            self.host.join(lane.clock)

    def _access(self, lane: Lane, launch: Launch) -> None:
        for is_write, regions in ((0, launch.reads), (1, launch.writes)):
            for region in regions:
                self._use(lane, launch.name, region, is_write)

    def _use(self, lane: Lane, name: str, region: Region, is_write: int) -> None:
        memory = region.memory
        if memory.notes is None:
            memory.notes = _Uses(None)
        uses: _Uses = memory.notes
        units = _units(region, uses)
        for kind in (0, 1) if is_write else (1,):
            late = uses.latest(units, kind) > lane.clock
            if late.any():
                self._find_race(lane, name, memory, np.nonzero(late)[0].tolist(), kind, is_write)
        uses.sites[lane.number, bool(is_write)] = f"{site()} ({name})"
        if units is None:
            uses.whole[is_write, lane.number] = lane.clock[lane.number]
            return
        if uses.parts is None:
            count = -(-memory.num_bytes // uses.unit)
            uses.parts = np.zeros((2, MAX_LANES, count), dtype=np.int64)
        uses.num_lanes = max(uses.num_lanes, lane.number + 1)
        uses.parts[is_write, lane.number, units] = lane.clock[lane.number]

    def _find_race(
        self, lane: Lane, name: str, memory: Memory, others: list[int], kind: int, is_write: int
    ) -> None:
        uses: _Uses = memory.notes
        for number in others:
            did, done = ("writes" if one else "reads" for one in (is_write, kind))
            other = self.world.lanes[number].name
            what = f"{other} {done} at {uses.sites[number, bool(kind)]}"
            self.find("race", f"{lane.name} {did} at {site()} ({name}) what {what}")


class World:
    """State shared by the ranks of one process."""

    def __init__(self) -> None:
        self.lanes: list[Lane] = []
        self.findings: dict[str, None] = {}
        """Findings in the order of their creation."""
        self.waits: dict[str, None] = {}
        """Waits of the host, with their source locations."""
        self.graphs: weakref.WeakSet[Graph] = weakref.WeakSet()
        self.is_over = False
        self._lock = threading.Lock()
        self._own = threading.local()

    def enter(self, lane: Lane) -> int:
        """Returns the number of a new lane."""
        with self._lock:
            self.lanes.append(lane)
            assert len(self.lanes) <= MAX_LANES, "more lanes than clocks count"
            return len(self.lanes) - 1

    @contextmanager
    def rank(self) -> Iterator[Clocks]:
        """Context in which the calling thread has a device."""
        clocks = self._own.clocks = Clocks(self)
        self._own.stand_in = StandIn(clocks)
        with self._own.stand_in:
            yield clocks

    @property
    def clocks(self) -> Clocks:
        """Clocks of the calling thread's device."""
        found: Clocks = self._own.clocks
        return found

    @property
    def stand_in(self) -> StandIn:
        """The calling thread's StandIn."""
        found: StandIn = self._own.stand_in
        return found


class Graph:
    """Fake of torch.cuda.CUDAGraph: repeats launches on the memory of their capture."""

    def __init__(self, clocks: Clocks) -> None:
        self.clocks = clocks
        self._stream: Lane | None = None
        self._steps: list[tuple[Launch, list[tuple[weakref.ref[Memory], str]]]] = []
        self.has_collectives = False
        clocks.world.graphs.add(self)

    def begin(self, stream: Lane) -> None:
        self._stream, self.clocks.capture = stream, self

    def end(self) -> None:
        self.clocks.capture = None

    def add(self, launch: Launch) -> None:
        if self.clocks.current is not self._stream:
            self.clocks.find("graph", f"{launch.name} at {site()} is on another stream")
        if launch.again is None:
            self.clocks.find("graph", f"{launch.name} at {site()} cannot be repeated")
        self.has_collectives |= launch.name.startswith("nccl")
        held = []
        for region in (*launch.reads, *launch.writes):
            if region.memory.is_pinned:
                self.clocks.find("graph", f"{launch.name} at {site()} has the host's memory")
            elif not region.memory.notes.is_pooled:
                held.append((weakref.ref(region.memory), region.memory.site))
        self._steps.append((Launch(launch.name, (), (), launch.again), held))

    def replay(self) -> None:
        """Replays all launches on the current stream."""
        for launch, held in self._steps:
            for memory, where in held:
                if memory() is None:
                    self.clocks.find("graph", f"{launch.name} replays on what {where} made: gone")
            if launch.again is not None:
                self.clocks.launched(launch.again())

    def reset(self) -> None:
        """Releases everything."""
        self._steps.clear()
        self.has_collectives = False


def _units(region: Region, uses: _Uses) -> npt.NDArray[np.int64] | slice | None:
    """Units of memory that a region touches, possibly with duplicates; None for all."""
    tensor, memory = region.tensor, region.memory
    if tensor.is_meta or (region.rows is None and tensor.nbytes == memory.num_bytes):
        return None
    if memory.num_bytes > _FINE_BYTES:
        uses.unit = max(4, -(-memory.num_bytes // (_FINE_BYTES // 4)) // 4 * 4)
    size, unit = tensor.itemsize, uses.unit
    first = tensor.storage_offset() * size
    if region.rows is None and tensor.is_contiguous():
        return slice(first // unit, -(-(first + tensor.nbytes) // unit))
    strides = [stride * size for stride in tensor.stride()]
    axes = list(zip(tensor.shape, strides, strict=True))
    rows = None if region.rows is None else _array(region.rows)
    span = size
    while len(axes) > (rows is not None) and axes[-1][1] == span:
        span *= axes.pop()[0]
    starts = np.full(1, first, dtype=np.int64)
    for axis, (length, stride) in enumerate(axes):
        index = rows if axis == 0 and rows is not None else np.arange(length)
        starts = (starts[:, None] + index[None] * stride).reshape(-1)
    firsts, lasts = starts // unit, (starts + span - 1) // unit
    if not starts.size or span == 0:
        return firsts[:0]
    offsets = np.arange((lasts - firsts).max() + 1)
    units: npt.NDArray[np.int64] = np.minimum(firsts[:, None] + offsets, lasts[:, None])
    return units.reshape(-1)


def _array(rows: torch.Tensor) -> npt.NDArray[np.int64]:
    values = torch._C.TensorBase.numpy(rows)  # the patched method reports accesses by the host
    found: npt.NDArray[np.int64] = np.unique(values.reshape(-1).astype(np.int64))
    return found
