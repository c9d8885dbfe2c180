"""Tensor reader: reads slices of tensors from safetensors files, in parallel and in place.

Files are memory-mapped. If a block's destination is on CPU and has the file's data type, a reader
thread copies the block there. Other blocks are copied to memory by a reader thread, then converted
or sent to a device by the caller's thread, which may use torch's threads. Mapped pages are released
after reading, so peak memory is the loaded weights plus a few blocks.
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

from worker.models.layers.linear_method import WeightSlot
from worker.progress import Advance

_BLOCK_BYTES = 4 << 20
_MOST_READERS = 8
"""Maximum number of reader threads, and thus of concurrent requests to a drive or file server."""
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
"""Data types by their safetensors name."""
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by size in bytes, used to copy values: numpy does not support all types."""

Words = npt.NDArray[Any]


class TensorFile:
    """A memory-mapped safetensors file; the loader has already checked its header."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            self._header = json.loads(file.read(size))
            self._begin = 8 + size
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def blocks(self, name: str, slot: WeightSlot) -> Iterator[Block]:
        """Blocks of the slot's slice of a tensor: several rows each if slice and destination have
        the same shape, otherwise a single block."""
        tensor = self._header[name]
        shape, dtype = tuple(tensor["shape"]), _TYPES[tensor["dtype"]]
        begin = self._begin + tensor["data_offsets"][0]
        words = np.dtype(f"i{dtype.itemsize}")
        count = math.prod(shape)
        values = np.frombuffer(self._map, words, count, begin).reshape(shape)
        if slot.stacked is not None:
            values, shape = values[slot.stacked.index, ...], shape[1:]
            begin += slot.stacked.index * values.nbytes
        part = values[local_part(slot, len(shape))]
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
    """A block of values to read from a file.

    Args:
        values: the values in the mapped file, as integers of the same size.
        destination: view of the layer's tensor to which they are written.
        dtype: data type of the values in the file.
        offset: added to the values.
        source: the mapped file, and the range of bytes that contains the values.
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
        """Number of bytes that are read from the file."""
        return self._values.nbytes

    def read(self) -> torch.Tensor | None:
        """Copies the values to the destination and returns None, or, if that needs torch, returns
        a copy for `store`. Runs in a reader thread."""
        if self._place is None:
            return self.read_copy()
        self._advise("MADV_WILLNEED")
        np.copyto(self._place, self._values.reshape(self._place.shape))
        self._advise("MADV_DONTNEED")
        return None

    def read_copy(self) -> torch.Tensor:
        """A copy of the values in the file's data type and the destination's shape."""
        self._advise("MADV_WILLNEED")
        copy = torch.from_numpy(self._values.reshape(self._destination.shape).copy())
        self._advise("MADV_DONTNEED")
        return copy.view(self._dtype)

    def store(self, copy: torch.Tensor) -> None:
        """Writes the copy that `read` returned to the destination, and adds the offset."""
        self._destination.copy_(copy)
        if self._offset:
            self._destination.add_(self._offset)

    def equals(self, copy: torch.Tensor) -> bool:
        """Whether the destination already holds the values of `copy`, as returned by `read`."""
        return torch.equal(copy.to(self._destination), self._destination)

    def _advise(self, advice: str) -> None:
        """Advises the kernel to read the block's pages ahead, or to release them, if the system
        supports it."""
        file, begin, end = self._source
        if (number := getattr(mmap, advice, None)) is not None:
            begin -= begin % mmap.PAGESIZE
            file.madvise(number, begin, end - begin)


def local_part(slot: WeightSlot, num_dims: int) -> tuple[slice, ...]:
    """Index expression of the slot's slice in a tensor with `num_dims` dimensions."""
    index = [slice(None)] * len(slot.full_shape)
    shape = slot.destination.shape if slot.read_shape is None else slot.read_shape
    index[slot.dim] = slice(slot.start, slot.start + shape[slot.dim])
    return tuple(index[:num_dims])


def read_blocks(blocks: Iterable[Block], advance: Advance) -> None:
    """Reads all blocks to their destinations, in order, with one thread per CPU, up to 8; calls
    `advance` with the number of bytes of each block."""
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
