"""Files that only their owner may read, and that do not grow for ever."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO


class RotatedFile:
    """Appends lines to `path`, mode 0600; when it is full, it is renamed PATH.1 and begun again.

    Args:
        path: its folder is made if it is not there, for its owner alone.
        max_bytes: of one file; there are two at most, so twice as many are used.
        buffering: bytes that may wait in memory; 1 writes with each line.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, *, max_bytes: int, buffering: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._buffering = buffering
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = self._open()
        self._num_bytes = path.stat().st_size

    @property
    def closed(self) -> bool:
        """Whether nothing more can be written."""
        return self._file.closed

    def write(self, line: bytes) -> None:
        """Appends a line. Raises OSError."""
        if self._num_bytes and self._num_bytes + len(line) >= self._max_bytes:
            self._file.close()
            os.replace(self._path, self._path.with_name(f"{self._path.name}.1"))
            self._file = self._open()
            self._num_bytes = 0
        self._file.write(line + b"\n")
        self._num_bytes += len(line) + 1
        if self._buffering == 1:
            self._file.flush()

    def close(self) -> None:
        """Writes what is left."""
        self._file.close()

    def _open(self) -> BinaryIO:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        descriptor = os.open(self._path, flags, 0o600)
        os.fchmod(descriptor, 0o600)  # one that is there may be readable by all
        return os.fdopen(descriptor, "ab", buffering=max(self._buffering, 4096))
