"""RotatedFile: a log file of limited size that only its owner may read."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections import defaultdict
from pathlib import Path
from typing import BinaryIO


class RotatedFile:
    """Appends lines to a file of mode 0600; a full file is renamed to NAME.1.SUFFIX.

    The file is locked (flock) while it is open. Files without a lock belong to exited gateways: the
    oldest of them are removed when a gateway starts, so that they do not accumulate.

    Args:
        path: path of the file; its folder is created with mode 0700 if it does not exist.
        max_bytes: maximum size in bytes of each of the two files, the current and the renamed one.
        others: glob pattern of the files of all gateways that log to the folder, such as
            `audit-*.jsonl`; files of exited gateways may have up to twice `max_bytes` in total.
            Empty to remove none.
        buffering: bytes buffered in memory; 1 writes each line immediately.

    Raises:
        OSError: the file is not writable, or is a symbolic link.
    """

    def __init__(self, path: Path, *, max_bytes: int, buffering: int, others: str = "") -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._buffering = buffering
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = self._open()
        self._num_bytes = path.stat().st_size
        if others:
            _remove_left_files(path.parent, others, 2 * max_bytes)

    def has_room(self, num_bytes: int = 0) -> bool:
        """Whether the file has room for `num_bytes` more; always true for an empty file."""
        return not self._num_bytes or self._num_bytes + num_bytes < self._max_bytes

    def turn_over(self) -> None:
        """Renames the full file, and starts a new one. Raises OSError."""
        full = self._file
        full.flush()
        os.replace(self.path, self.path.with_suffix(f".1{self.path.suffix}"))
        self._file = self._open()
        self._num_bytes = 0
        full.close()  # last, so that one of the two files is always locked

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
        """Flushes buffered lines, and closes the file. Raises OSError."""
        self._file.close()

    def _open(self) -> BinaryIO:
        # HAZARD: in a folder writable by others, the path may be a link to another file.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self.path, flags, 0o600)
        os.fchmod(descriptor, 0o600)  # an existing file may be readable by all
        with contextlib.suppress(OSError):  # network file systems may not support locks
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.fdopen(descriptor, "ab", buffering=max(self._buffering, 4096))


def _remove_left_files(folder: Path, pattern: str, max_bytes: int) -> None:
    """Removes the oldest files of exited processes until the remaining ones have at most
    `max_bytes`.

    A process's files, NAME.SUFFIX and NAME.1.SUFFIX, are removed together.
    """
    by_process: dict[str, list[Path]] = defaultdict(list)
    for path in folder.glob(pattern):
        by_process[path.stem.removesuffix(".1")].append(path)
    left: list[tuple[float, int, list[Path]]] = []
    for paths in by_process.values():
        with contextlib.suppress(OSError):  # another process may be removing them as well
            if not any(map(_is_locked, paths)):
                states = [path.stat() for path in paths]
                newest = max(state.st_mtime for state in states)
                left.append((newest, sum(state.st_size for state in states), paths))
    total = sum(size for _, size, _ in left)
    for _, size, paths in sorted(left):
        if total <= max_bytes:
            return
        total -= size
        for path in paths:
            path.unlink(missing_ok=True)


def _is_locked(path: Path) -> bool:
    """Whether a process has the file open; also true if the file system does not support locks."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False
