"""Snapshots of linear-attention states in one rank's host memory."""

from __future__ import annotations

from math import prod

import torch

from worker.plan.plan import PageCopies
from worker.rank.cpu import lazy_zeros
from worker.rank.states import RequestStates

_ALIGNMENT = 16
"""Alignment of each layer's part of a snapshot, in bytes: a multiple of every type's size."""


class HostStates:
    """Snapshots in host memory, copied to and from the state caches on the current stream.

    A snapshot is contiguous. Its parts are copied one by one, without a staging buffer: a layer's
    recurrent state takes hundreds of KiB, unlike its part of a page.

    Args:
        count: number of snapshots.
        states: states of requests, and snapshots on the device.
    """

    def __init__(self, count: int, states: RequestStates) -> None:
        self._num_slots = states.num_slots
        self._planes = [
            plane for cache in states.caches.values() for plane in (cache.conv, cache.recurrent)
        ]
        """Planes of the layers' state caches, [states, ...] each."""
        sizes = [prod(plane.shape[1:]) * plane.itemsize for plane in self._planes]
        aligned = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
        self.snapshots = lazy_zeros((count, sum(aligned)), torch.uint8)
        """[snapshots, bytes] in host memory."""
        self._parts: list[torch.Tensor] = []
        """Each plane's part of the snapshots, with the type and shape of its states."""
        start = 0
        for plane, size, step in zip(self._planes, sizes, aligned, strict=True):
            part = self.snapshots[:, start : start + size].view(plane.dtype)
            self._parts.append(part.unflatten(1, plane.shape[1:]))
            start += step

    def store(self, copies: PageCopies) -> None:
        """Copies snapshots on the device to host memory (`Plan.host_state_stores`)."""
        for snapshot, number in zip(copies.pages, copies.slots, strict=True):
            for plane, part in zip(self._planes, self._parts, strict=True):
                part[number].copy_(plane[self._num_slots + snapshot], non_blocking=True)

    def load(self, copies: PageCopies) -> None:
        """Copies snapshots in host memory to states of slots (`Plan.host_state_loads`)."""
        for slot, number in zip(copies.pages, copies.slots, strict=True):
            for plane, part in zip(self._planes, self._parts, strict=True):
                plane[slot].copy_(part[number], non_blocking=True)
