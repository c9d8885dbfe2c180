"""Fake CUDA streams and events that run everything immediately and detect possible races.

Each stream, and the host, is a lane with a vector clock. Operations in different lanes are ordered
only if an event was recorded and waited for in between, or if the host launched one after the
other. A write that is unordered with another access to the same tensor is a race, even if the order
happened to be correct.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Race(AssertionError):
    pass


@dataclass(eq=False)
class Lane:
    """A stream, or the host."""

    name: str
    detector: Detector
    clock: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def join(self, clock: dict[str, int]) -> None:
        for name, count in clock.items():
            self.clock[name] = max(self.clock[name], count)

    def wait_event(self, event: Event) -> None:
        self.join(self.detector.host.clock)
        self.join(event.clock)


class Event:
    def __init__(self, detector: Detector) -> None:
        self._detector = detector
        self.clock: dict[str, int] = {}

    def record(self, stream: Lane | None = None) -> None:
        lane = stream or self._detector.current
        lane.join(self._detector.host.clock)
        self.clock = dict(lane.clock)

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self._detector.host.join(self.clock)

    def elapsed_time(self, _end_event: Event) -> float:
        return 0.25


class Detector(TorchDispatchMode):
    """Observes every copy between tensors within a `with` block; accesses by the host must be
    reported."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.host = Lane("host", self)
        self.current = Lane("default", self)
        self._num_lanes = 0
        self._accesses: list[tuple[range, str, int, bool]] = []
        self._kept: list[torch.Tensor] = []
        empty = torch.empty

        def pageable(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
            # Kept alive, so that no two buffers ever have the same address.
            self._kept.append(empty(*size, **options))
            return self._kept[-1]

        monkeypatch.setattr(torch, "empty", pageable)
        monkeypatch.setattr(torch.cuda, "Stream", self._stream)
        monkeypatch.setattr(torch.cuda, "Event", lambda **_: Event(self))
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)

    def _stream(self, _device: torch.device) -> Lane:
        self._num_lanes += 1
        return Lane(f"stream {self._num_lanes}", self)

    @contextmanager
    def on(self, lane: Lane) -> Iterator[None]:
        before, self.current = self.current, lane
        try:
            yield
        finally:
            self.current = before

    def by_host(self, tensor: torch.Tensor, *, write: bool) -> None:
        self._access(self.host, tensor, write=write)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        # Other operations are on the compute stream.
        if func is torch.ops.aten.copy_.default and args[0].is_contiguous():
            lane = self.current
            lane.join(self.host.clock)
            self._access(lane, args[1], write=False)
            self._access(lane, args[0], write=True)
        return func(*args, **(kwargs or {}))

    def _access(self, lane: Lane, tensor: torch.Tensor, *, write: bool) -> None:
        own = range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
        for place, name, count, was_write in self._accesses:
            overlaps = place.start < own.stop and own.start < place.stop
            if overlaps and (write or was_write) and lane.clock[name] < count:
                raise Race(f"{lane.name} {'writes' if write else 'reads'} what {name} uses")
        lane.clock[lane.name] += 1
        self._accesses.append((own, lane.name, lane.clock[lane.name], write))
