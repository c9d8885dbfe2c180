"""Pinning of large host memory: the first piece immediately, the others in the background."""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
import threading

import torch

logger = logging.getLogger(__name__)

_PIECE_BYTES = 128 << 20
"""Minimum number of bytes pinned at a time. Other CUDA calls of the process may have to wait
meanwhile."""
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE (Linux 5.14): allocates memory as if each of its pages were written."""


class PinnedRows:
    """Pins the memory of a tensor in place; torch would round pinned memory up to a power of two.

    Pinning takes up to a second per GiB, most of which is spent allocating the memory. Only the
    first piece is therefore pinned immediately; `start` pins the others in a thread. Until then,
    copies to and from their rows are slower.

    Pieces consist of whole rows and whole memory pages, so that no copy of a row crosses the
    boundary between pieces, which CUDA would reject.

    Args:
        tensor: contiguous rows in host memory, aligned to a memory page.
        device: the CUDA device that copies them.

    Raises:
        ValueError: the first piece cannot be pinned.
    """

    def __init__(self, tensor: torch.Tensor, device: torch.device) -> None:
        self._tensor = tensor
        self._device = device
        self._pieces = _split(tensor)
        self._pinned: list[int] = []
        """Addresses of pinned pieces."""
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._pin(*self._pieces.pop(0))

    def start(self) -> None:
        """Pins the other pieces in a thread. Must not run while CUDA graphs are captured: the
        capture would fail."""
        if self._pieces and self._thread is None:
            self._thread = threading.Thread(target=self._pin_all, name="pinning", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Ends the thread and unpins all memory: the next engine in the process may map the same
        addresses."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
        for address in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(address)
        self._pinned.clear()

    def _pin_all(self) -> None:
        # Otherwise, CUDA would create a context on the first device.
        torch.cuda.set_device(self._device)
        libc = ctypes.CDLL(None, use_errno=True)
        for address, num_bytes in self._pieces:
            if self._stopped.is_set():
                return
            # Done before CUDA holds its locks. If this fails, pinning allocates the memory itself.
            libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), _POPULATE_WRITE)
            try:
                self._pin(address, num_bytes)
            except ValueError as error:
                logger.warning("%s; copies to and from host memory will be slower", error)
                return
        total = self._tensor.nbytes / 2**30
        logger.info("pinned %.1f GiB of host memory for KV offloading", total)

    def _pin(self, address: int, num_bytes: int) -> None:
        error = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))
        if error:
            total = self._tensor.nbytes / 2**30
            raise ValueError(
                f"failed to pin {num_bytes / 2**30:.2f} of {total:.1f} GiB of host memory "
                f"(CUDA error {error}): lower --host-cache-gib"
            )
        self._pinned.append(address)


def _split(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Pieces of a tensor's memory: addresses and numbers of bytes."""
    row_bytes = tensor[0].numel() * tensor.itemsize
    # Pieces of whole rows and whole pages of memory.
    unit = math.lcm(row_bytes, mmap.PAGESIZE)
    size = -(-_PIECE_BYTES // unit) * unit
    start, total = tensor.data_ptr(), tensor.nbytes
    assert start % mmap.PAGESIZE == 0, "not from the start of a page of memory"
    return [(start + at, min(size, total - at)) for at in range(0, total, size)]
