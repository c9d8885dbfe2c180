"""Weight cache: files of packed weights in the user's cache folder, memory-mapped by all processes
that use them.

A file holds the packed weights, then the CRC-32 of each block of 8 MiB, then an end marker. It is
renamed to its final name when complete, and never modified afterwards. A process that maps it
verifies the checksums first; corrupt files are repacked.

A process that uses or writes a file holds a lock on it (flock), so that only unused files are
evicted, least recently used first. `rm -r ~/.cache/rayfleet/weights` is safe at any time.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import logging
import mmap
import os
import shutil
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from kernels.native.build import build_library, private_folder
from kernels.native.weight_memory import WeightMemory

logger = logging.getLogger(__name__)

_PIECE_BYTES = 8 << 20
_MARK = b"rayfleet weights"
_DISK_SHARES = 4
"""The packed weights may take at most the disk's size divided by this."""
_PROT_READ = 1
"""Argument of mprotect that makes pages read-only."""


class MappedMemory(WeightMemory):
    """A memory-mapped file of packed weights, whose pages are shared by all processes that map it.

    The pages are part of the page cache, which uses small pages on most file systems.

    Args:
        file: file of the right size, which stays locked for as long as this object exists.
        num_bytes: number of bytes of weights in the file.
        is_filled: whether the file has the weights; the mapping is then read-only.
    """

    def __init__(self, file: BinaryIO, num_bytes: int, *, is_filled: bool) -> None:
        super().__init__()
        self.is_filled = is_filled
        access = mmap.ACCESS_READ if is_filled else mmap.ACCESS_WRITE
        self._region = mmap.mmap(file.fileno(), 0, access=access)
        self._num_bytes = num_bytes
        # Accessed by address, since torch has no read-only tensors and warns when one is created
        # from a buffer.
        self._address = np.frombuffer(self._region, np.uint8).ctypes.data
        weights = (ctypes.c_uint8 * num_bytes).from_address(self._address)
        self._chunk = torch.frombuffer(weights, dtype=torch.uint8)

    def sums(self) -> bytes:
        """Checksums and end marker that follow the weights in a complete file."""
        with memoryview(self._region) as data, ThreadPoolExecutor(os.cpu_count()) as pool:
            ends = [*range(_PIECE_BYTES, self._num_bytes, _PIECE_BYTES), self._num_bytes]
            starts = range(0, self._num_bytes, _PIECE_BYTES)
            sums = list(pool.map(lambda start, end: zlib.crc32(data[start:end]), starts, ends))
        return np.array(sums, np.uint32).tobytes() + _MARK

    def is_whole(self) -> bool:
        """Whether the file is complete and intact."""
        return self._region[self._num_bytes :] == self.sums()

    def finish(self) -> None:
        """Writes the checksums after the weights, and makes the mapping read-only."""
        self._region[self._num_bytes :] = self.sums()
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mprotect(ctypes.c_void_p(self._address), len(self._region), _PROT_READ):
            raise OSError(ctypes.get_errno(), "failed to write-protect the weights")

    def _extend(self, least: int) -> torch.Tensor:
        raise AssertionError(f"{least} more bytes are used than were counted")


@contextmanager
def cached_memory(content: str, num_bytes: int) -> Iterator[WeightMemory]:
    """Context manager that yields the memory of a file with packed weights. If there is no file
    yet, the caller fills the memory in the `with` block; on exit, it becomes a file for other
    processes. Only one process at a time does so; the other ones wait.

    If the file cannot be created, for example because the disk is full, logs a warning and uses
    private memory.

    Args:
        content: identifies everything on which the weights depend, except the library and the CPU.
        num_bytes: number of bytes of the weights.

    Raises:
        NativeUnavailable: the library cannot be compiled or loaded on this machine.
    """
    key = hashlib.sha256(f"{build_library().name}\0{content}\0{num_bytes}".encode()).hexdigest()[
        :32
    ]
    with ExitStack() as stack:
        try:
            path = _folder() / key
            lock = stack.enter_context(path.with_suffix(".lock").open("wb"))
            fcntl.flock(lock, fcntl.LOCK_EX)
            memory = _map(path, num_bytes)
            if memory is None:
                memory = stack.enter_context(_new_file(path, num_bytes))
        except OSError as error:
            logger.warning("packed weights are not cached or shared: %s", error)
            yield WeightMemory()
            return
        yield memory


def _folder() -> Path:
    folder = private_folder("weights")
    if folder is None:
        raise PermissionError(
            "rayfleet/weights in XDG_CACHE_HOME (default: ~/.cache) must be writable by its owner "
            "only: run chmod 700 on it, or set XDG_CACHE_HOME"
        )
    return folder


def _map(path: Path, num_bytes: int) -> MappedMemory | None:
    """Memory of a file with weights; None if there is no file, or if it was corrupt and has been
    removed."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None
    with file:
        fcntl.flock(file, fcntl.LOCK_SH)  # held for as long as the mapping
        if os.fstat(file.fileno()).st_size == _file_bytes(num_bytes):
            memory = MappedMemory(file, num_bytes, is_filled=True)
            if memory.is_whole():
                os.utime(path)
                logger.info("mapped %.1f MB of packed weights", num_bytes / 1e6)
                return memory
    logger.warning("%s is corrupt; repacking weights", path)
    path.unlink(missing_ok=True)
    return None


@contextmanager
def _new_file(path: Path, num_bytes: int) -> Iterator[MappedMemory]:
    """Context manager that yields the memory of a new file, which gets its final name on exit."""
    _make_room(path.parent, _file_bytes(num_bytes))
    unfinished = path.with_suffix(".part")
    with ExitStack() as stack:
        stack.callback(unfinished.unlink, missing_ok=True)
        with unfinished.open("w+b") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            # Allocate now: on a full disk, a write to the mapping would kill the process.
            os.posix_fallocate(file.fileno(), 0, _file_bytes(num_bytes))
            memory = MappedMemory(file, num_bytes, is_filled=False)
        yield memory
        try:
            memory.finish()
            unfinished.rename(path)
        except OSError as error:
            logger.warning(
                "failed to cache packed weights; they will be repacked at the next startup: %s",
                error,
            )


def _file_bytes(num_bytes: int) -> int:
    return num_bytes + 4 * -(-num_bytes // _PIECE_BYTES) + len(_MARK)


def _make_room(folder: Path, needed: int) -> None:
    """Evicts unused files, least recently used first, until `needed` more bytes fit in the cache's
    share of the disk.

    Raises:
        OSError: the bytes do not fit even after all unused files have been evicted.
    """
    most = shutil.disk_usage(folder).total // _DISK_SHARES
    files = [(path.stat(), path) for path in folder.iterdir() if path.suffix != ".lock"]
    total = needed + sum(status.st_size for status, _ in files)
    for status, path in sorted(files, key=lambda found: found[0].st_mtime):
        if total <= most:
            return
        with path.open("rb") as file, suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Keep its .lock file: waiting and later processes must lock the same file.
            path.unlink(missing_ok=True)
            total -= status.st_size
    if total > most:
        raise OSError(errno.ENOSPC, f"{folder} would exceed 1/{_DISK_SHARES} of its disk")
