"""Packed weights in files of the user's cache folder, mapped by all processes that need them.

A file holds what a decoder takes of its memory, then the CRC-32 of each piece of that, then a mark.
It appears under its name once it is whole, and is never written again. Whoever maps it compares the
pieces first: what a crash or a disk has spoilt is packed anew.

Whoever uses or writes a file holds a lock of it (flock), so that room is made by removing only what
nobody uses, the longest unused first. `rm -r ~/.cache/rayfleet/weights` is safe at any time.
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
"""Packed weights take a quarter of the disk at most: checkpoints lie there, too."""
_PROT_READ = 1
"""Argument of mprotect: pages may only be read."""


class MappedMemory(WeightMemory):
    """A mapped file of packed weights, whose pages all who map it share.

    They are pages of the system's file cache, which are small ones on most file systems.

    Args:
        file: of the right size. It stays locked for as long as this lives.
        num_bytes: of it that are weights.
        is_filled: whether they are there; the mapping is only read then.
    """

    def __init__(self, file: BinaryIO, num_bytes: int, *, is_filled: bool) -> None:
        super().__init__()
        self.is_filled = is_filled
        access = mmap.ACCESS_READ if is_filled else mmap.ACCESS_WRITE
        self._region = mmap.mmap(file.fileno(), 0, access=access)
        self._num_bytes = num_bytes
        # By its address, since torch has no tensors that are only read, and warns of them.
        self._address = np.frombuffer(self._region, np.uint8).ctypes.data
        weights = (ctypes.c_uint8 * num_bytes).from_address(self._address)
        self._chunk = torch.frombuffer(weights, dtype=torch.uint8)

    def sums(self) -> bytes:
        """Checksums that stand behind the weights in a file that is whole."""
        with memoryview(self._region) as data, ThreadPoolExecutor(os.cpu_count()) as pool:
            ends = [*range(_PIECE_BYTES, self._num_bytes, _PIECE_BYTES), self._num_bytes]
            starts = range(0, self._num_bytes, _PIECE_BYTES)
            sums = list(pool.map(lambda start, end: zlib.crc32(data[start:end]), starts, ends))
        return np.array(sums, np.uint32).tobytes() + _MARK

    def is_whole(self) -> bool:
        """Whether the file is as it was when it was finished."""
        return self._region[self._num_bytes :] == self.sums()

    def finish(self) -> None:
        """Puts the sums behind the weights; from then on the mapping is only read."""
        self._region[self._num_bytes :] = self.sums()
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mprotect(ctypes.c_void_p(self._address), len(self._region), _PROT_READ):
            raise OSError(ctypes.get_errno(), "weights cannot be protected")

    def _extend(self, least: int) -> torch.Tensor:
        raise AssertionError(f"{least} bytes more are taken than were counted")


@contextmanager
def cached_memory(content: str, num_bytes: int) -> Iterator[WeightMemory]:
    """The memory of a file that holds packed weights, or that is to: then its user fills it within
    the context, and others find it afterwards. One process does so at a time, others wait for it.

    Where no file can be had, as on a full disk, one line in the log says so, and the memory is this
    process's own.

    Args:
        content: names all that the weights depend on, but for the library and the processor.
        num_bytes: how much is taken.

    Raises:
        NativeUnavailable: the library cannot be had on this machine.
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
            logger.warning("packed weights stay this process's own, in no cache folder: %s", error)
            yield WeightMemory()
            return
        yield memory


def _folder() -> Path:
    folder = private_folder("weights")
    if folder is None:
        raise PermissionError("the user's cache folder cannot be written, or others may write it")
    return folder


def _map(path: Path, num_bytes: int) -> MappedMemory | None:
    """The weights in a file; None where there is none, or where it is spoilt, and removed."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None
    with file:
        fcntl.flock(file, fcntl.LOCK_SH)  # which the mapping keeps
        if os.fstat(file.fileno()).st_size == _file_bytes(num_bytes):
            memory = MappedMemory(file, num_bytes, is_filled=True)
            if memory.is_whole():
                os.utime(path)
                logger.info("mapped %.1f MB of packed weights", num_bytes / 1e6)
                return memory
    logger.warning("%s is spoilt: its weights are packed again", path)
    path.unlink(missing_ok=True)
    return None


@contextmanager
def _new_file(path: Path, num_bytes: int) -> Iterator[MappedMemory]:
    """Memory of a file that is put in place when its user has filled it."""
    _make_room(path.parent, _file_bytes(num_bytes))
    unfinished = path.with_suffix(".part")
    with ExitStack() as stack:
        stack.callback(unfinished.unlink, missing_ok=True)
        with unfinished.open("w+b") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            # What a full disk has no room for would end the process when it is written.
            os.posix_fallocate(file.fileno(), 0, _file_bytes(num_bytes))
            memory = MappedMemory(file, num_bytes, is_filled=False)
        yield memory
        try:
            memory.finish()
            unfinished.rename(path)
        except OSError as error:
            logger.warning("the next start packs weights, too: %s", error)


def _file_bytes(num_bytes: int) -> int:
    return num_bytes + 4 * -(-num_bytes // _PIECE_BYTES) + len(_MARK)


def _make_room(folder: Path, needed: int) -> None:
    """Removes files that nobody uses, the longest unused first, until so many bytes more are a
    share of the disk. Raises OSError where they cannot be."""
    most = shutil.disk_usage(folder).total // _DISK_SHARES
    files = [(path.stat(), path) for path in folder.iterdir() if path.suffix != ".lock"]
    total = needed + sum(status.st_size for status, _ in files)
    for status, path in sorted(files, key=lambda found: found[0].st_mtime):
        if total <= most:
            return
        with path.open("rb") as file, suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Not its lock: who waits for that would hold another one than who comes next.
            path.unlink(missing_ok=True)
            total -= status.st_size
    if total > most:
        raise OSError(errno.ENOSPC, f"{folder} would take more than 1/{_DISK_SHARES} of its disk")
