"""Reads parts of tensors from safetensors files, several at a time, straight to where they go.

Files are mapped. A block whose values are of the destination's type on this machine is copied there
by a reading thread; any other is copied out, and converted or sent to its device by the caller's
thread, which has torch's own. Pages that were read are let go of: a process never holds more than
what it loads and the blocks that are on their way.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from worker.models.linear_method import WeightSlot
from worker.progress import Advance

_BLOCK_BYTES = 4 << 20
_MOST_READERS = 8
"""Most blocks that a drive or a file server is asked for at a time; one for each reader."""
_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Types by their names in headers."""
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Types that numpy knows, too, by size: values are copied without a look at them."""

Words = npt.NDArray[Any]


class TensorFile:
    """A safetensors file whose header is known to be right."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            self._header = json.loads(file.read(size))
            self._begin = 8 + size
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def blocks(self, name: str, slot: WeightSlot) -> Iterator[Block]:
        """The slot's part of a tensor, in blocks of rows where it has rows as the file has."""
        tensor = self._header[name]
        shape, dtype = tuple(tensor["shape"]), _TYPES[tensor["dtype"]]
        begin = self._begin + tensor["data_offsets"][0]
        words = np.dtype(f"i{dtype.itemsize}")
        count = math.prod(shape)
        values = np.frombuffer(self._map, words, count, begin).reshape(shape)
        part = values[own_part(slot, len(shape))]
        destination = slot.destination
        if not part.size or not destination.numel():
            return
        if part.shape != destination.shape or not shape:
            source = self._map, begin, begin + values.nbytes
            yield Block(part, destination, dtype, slot.offset, source)
            return
        row_bytes = values.nbytes // shape[0]
        step = max(1, _BLOCK_BYTES * len(part) // part.nbytes)
        first = slot.start if slot.dim == 0 else 0
        for row in range(0, len(part), step):
            rows = slice(row, min(row + step, len(part)))
            span = (begin + (first + place) * row_bytes for place in (rows.start, rows.stop))
            yield Block(part[rows], destination[rows], dtype, slot.offset, (self._map, *span))


class Block:
    """Values on their way from a file.

    Args:
        values: in the mapped file, as integers.
        destination: where they go.
        dtype: what they are.
        offset: what is added to them there.
        source: the file and where in it they lie, between others' perhaps.
    """

    def __init__(
        self,
        values: Words,
        destination: torch.Tensor,
        dtype: torch.dtype,
        offset: float,
        source: tuple[mmap.mmap, int, int],
    ) -> None:
        self._values = values
        self._destination = destination
        self._dtype = dtype
        self._offset = offset
        self._source = source
        self._place: Words | None = None
        if destination.device.type == "cpu" and destination.dtype == dtype and not offset:
            self._place = destination.view(_WORDS[dtype.itemsize]).numpy()

    @property
    def num_bytes(self) -> int:
        """Read from the file."""
        return self._values.nbytes

    def read(self) -> torch.Tensor | None:
        """Copies the values to where they go, and returns None, or returns a copy."""
        if self._place is None:
            return self.read_copy()
        self._advise("MADV_WILLNEED")
        np.copyto(self._place, self._values.reshape(self._place.shape))
        self._advise("MADV_DONTNEED")
        return None

    def read_copy(self) -> torch.Tensor:
        """A copy of the values in their own type, in the destination's shape."""
        self._advise("MADV_WILLNEED")
        copy = torch.from_numpy(self._values.reshape(self._destination.shape).copy())
        self._advise("MADV_DONTNEED")
        return copy.view(self._dtype)

    def store(self, copy: torch.Tensor) -> None:
        """Converts what `read` has returned."""
        self._destination.copy_(copy)
        if self._offset:
            self._destination.add_(self._offset)

    def equals(self, copy: torch.Tensor) -> bool:
        """Whether the destination holds the same."""
        return torch.equal(copy.to(self._destination), self._destination)

    def _advise(self, advice: str) -> None:
        """Has the system read pages at once, or let go of them; where it can be told."""
        file, begin, end = self._source
        if (number := getattr(mmap, advice, None)) is not None:
            begin -= begin % mmap.PAGESIZE
            file.madvise(number, begin, end - begin)


def own_part(slot: WeightSlot, num_dims: int) -> tuple[slice, ...]:
    """Which part of a tensor of so many dimensions goes into the slot."""
    index = [slice(None)] * len(slot.full_shape)
    shape = slot.destination.shape if slot.read_shape is None else slot.read_shape
    index[slot.dim] = slice(slot.start, slot.start + shape[slot.dim])
    return tuple(index[:num_dims])


def read_blocks(blocks: Iterable[Block], advance: Advance) -> None:
    """Brings all blocks to their destinations, in the order of files and about as many at a time
    as there are processors."""
    num_readers = min(_MOST_READERS, os.cpu_count() or 1)
    pending = deque[tuple[Block, "Future[torch.Tensor | None]"]]()

    def finish() -> None:
        block, future = pending.popleft()
        if (copy := future.result()) is not None:
            block.store(copy)
        advance(block.num_bytes)

    with ThreadPoolExecutor(num_readers, thread_name_prefix="weights") as pool:
        for block in blocks:
            pending.append((block, pool.submit(block.read)))
            if len(pending) == 2 * num_readers:
                finish()
        while pending:
            finish()
