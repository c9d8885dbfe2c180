"""RotatedFile: a log file of limited size that only its owner may read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO


class RotatedFile:
    """Appends lines to a file of mode 0600; a full file is renamed to NAME.1.SUFFIX.

    Args:
        path: path of the file; its folder is made if it does not exist, with mode 0700.
        max_bytes: most bytes of a file; there are two at most.
        buffering: bytes that may wait in memory; 1 writes each line at once.

    Raises:
        OSError: the file cannot be written, or is a symbolic link.
    """

    def __init__(self, path: Path, *, max_bytes: int, buffering: int) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._buffering = buffering
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = self._open()
        self._num_bytes = path.stat().st_size

    def has_room(self, num_bytes: int = 0) -> bool:
        """Whether the file has room for `num_bytes` more; an empty file always has."""
        return not self._num_bytes or self._num_bytes + num_bytes < self._max_bytes

    def turn_over(self) -> None:
        """Renames the file, and begins the next. Raises OSError."""
        self._file.close()
        os.replace(self.path, self.path.with_suffix(f".1{self.path.suffix}"))
        self._file = self._open()
        self._num_bytes = 0

    def append(self, line: bytes) -> None:
        """Writes a line to the file, or to the next one if it is full. Raises OSError."""
        if not self.has_room(len(line)):
            self.turn_over()
        self.write(line)

    def write(self, line: bytes) -> None:
        """Writes a line to the file, even if it is full. Raises OSError."""
        self._file.write(line + b"\n")
        self._num_bytes += len(line) + 1
        if self._buffering == 1:
            self._file.flush()

    def close(self) -> None:
        """Writes waiting lines, and closes the file. Raises OSError."""
        self._file.close()

    def _open(self) -> BinaryIO:
        # HAZARD: in a folder that others can write to, the path may be a link to another file.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self.path, flags, 0o600)
        os.fchmod(descriptor, 0o600)  # an existing file may be readable by all
        return os.fdopen(descriptor, "ab", buffering=max(self._buffering, 4096))
