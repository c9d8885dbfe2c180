"""Digests (SHA-256) of weight files, each computed once per machine. Does not import torch.

In the Hub's cache, a file's name is its digest. Other files are read as a whole, several at a time,
and their digests are kept in the user's cache folder until the file changes.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_DIGEST = re.compile(r"[0-9a-f]{64}")
_MAX_KEPT = 4096
"""Maximum number of digests that are kept, enough for about a hundred checkpoints. Each takes a
disk block."""
_SETTLED_S = 2.0
"""Time in seconds since a file's last change after which another change is sure to alter the file's
timestamps, regardless of their resolution."""


def digests(files: Sequence[Path]) -> list[str]:
    """The SHA-256 of each file's content."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(_digest, files))


def _digest(path: Path) -> str:
    path = path.resolve()
    if path.parent.name == "blobs" and _DIGEST.fullmatch(path.name):
        return path.name  # where huggingface_hub keeps large files
    status = path.stat()
    folder = _folder()
    if folder is None or time.time() - status.st_ctime < _SETTLED_S:
        return _compute(path)
    times = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    key = hashlib.sha256(f"{path}\0{times}".encode(errors="surrogateescape")).hexdigest()
    try:
        return _kept_digest(folder, key[:32], path)
    except OSError:  # the disk is full, or does not support locks
        return _compute(path)


def _kept_digest(folder: Path, key: str, path: Path) -> str:
    """The digest stored under a key; computed and stored if there is none. If several workers on a
    node start at the same time, one computes it and the others wait."""
    with (folder / key).open("a+", errors="replace") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        known = file.read()
        if _DIGEST.fullmatch(known):
            return known
        digest = _compute(path)
        file.truncate(0)
        file.write(digest)
    _drop_oldest(folder)
    return digest


def _compute(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _drop_oldest(folder: Path) -> None:
    kept = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)
    for path in kept[:-_MAX_KEPT]:
        path.unlink(missing_ok=True)


def _folder() -> Path | None:
    """The folder of digests; None if other users can write to it, or the current user cannot."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(base) / "rayfleet" / "digests"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.stat()
        if status.st_uid == os.getuid() and not status.st_mode & 0o022:
            return folder
    return None
