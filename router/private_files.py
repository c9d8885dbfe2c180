"""Files that only their owner may read, and that do not grow for ever."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO


class RotatedFile:
    """Appends lines to `path`, mode 0600; a full one becomes NAME.1.SUFFIX in place of the last.

    Args:
        path: its folder is made if it is not there, for its owner alone.
        max_bytes: of one file; there are two at most, so twice as many are used.
        buffering: bytes that may wait in memory; 1 writes with each line.

    Raises:
        OSError: the file cannot be written, or is a link to another.
    """

    def __init__(self, path: Path, *, max_bytes: int, buffering: int) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._buffering = buffering
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = self._open()
        self._num_bytes = path.stat().st_size

    def has_room(self, num_bytes: int = 0) -> bool:
        """Whether so many bytes still go into this file; the first line always does."""
        return not self._num_bytes or self._num_bytes + num_bytes < self._max_bytes

    def turn_over(self) -> None:
        """Begins the next file. Raises OSError."""
        self._file.close()
        os.replace(self.path, self.path.with_suffix(f".1{self.path.suffix}"))
        self._file = self._open()
        self._num_bytes = 0

    def append(self, line: bytes) -> None:
        """Writes a line to this file, or to the next where this one is full. Raises OSError."""
        if not self.has_room(len(line)):
            self.turn_over()
        self.write(line)

    def write(self, line: bytes) -> None:
        """Writes a line to this file, full or not. Raises OSError."""
        self._file.write(line + b"\n")
        self._num_bytes += len(line) + 1
        if self._buffering == 1:
            self._file.flush()

    def close(self) -> None:
        """Writes what is left. Raises OSError."""
        self._file.close()

    def _open(self) -> BinaryIO:
        # HAZARD: in a folder that others may write to, the name may be a link to somewhere else.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self.path, flags, 0o600)
        os.fchmod(descriptor, 0o600)  # one that is there may be readable by all
        return os.fdopen(descriptor, "ab", buffering=max(self._buffering, 4096))
