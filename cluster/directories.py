"""Private directories of fleets in /tmp: created at startup, removed at shutdown or by a later
start.

Each contains a lock file, which is locked while the process that created it is running. A directory
is stale if its lock is free and no process has it in its environment.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

DIRECTORY_VARIABLE = "RAYFLEET_RUNTIME_DIRECTORY"
"""Environment variable with the private directory, for every process of a local cluster."""

_PARENT = Path("/tmp")
_PREFIX = "rf-"
_LOCK = "owner.lock"


def private_directory(parent: Path = _PARENT) -> Path:
    """Creates a directory of mode 0700, locked until this process ends; removes stale ones.

    The path is short, since paths of Unix sockets are limited to 107 bytes.
    """
    remove_stale_directories(parent)
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    # HAZARD: with a lock file that is not locked yet the directory would count as stale, so it is
    # renamed after locking. The descriptor stays open until the process ends.
    new = directory / f"{_LOCK}.new"
    descriptor = os.open(new, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    new.rename(directory / _LOCK)
    return directory


def ray_directory(directory: Path) -> Path:
    """Folder for sockets, logs and spilled objects of a local Ray cluster.

    Ray makes this folder, by default /tmp/ray, writable by everyone, so that other users of the
    machine could replace sockets. Within the private `directory`, they cannot access it.
    """
    return directory / "ray"


def remove_private_directory(directory: Path, *, keep_logs: bool = False) -> None:
    """Removes a private directory; `keep_logs`, for failed starts, keeps Ray's logs."""
    kept = []
    if keep_logs:
        kept = list(ray_directory(directory).glob("session_[0-9]*/logs"))
        kept += [directory / _LOCK] if kept else []
    _remove_all_but(kept, directory)


def remove_stale_directories(parent: Path = _PARENT) -> None:
    """Removes the directories of this user's stopped fleets, except for the Ray logs of the
    newest."""
    stale = sorted(_stale_directories(parent), key=lambda path: (path / _LOCK).stat().st_mtime)
    with_logs = [path for path in stale if ray_directory(path).is_dir()]
    for path in stale:
        remove_private_directory(path, keep_logs=path in with_logs[-1:])


def processes_of(directory: Path) -> list[int]:
    """IDs of the processes of the local cluster with this private directory, except for this one.

    HAZARD: psutil reads an environment up to its first empty entry, and Ray leaves empty ones, as
    it overwrites the environment with process titles.
    """
    entry_of_cluster = f"{DIRECTORY_VARIABLE}={directory}".encode()
    pids = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            pid = int(entry.parent.name)
            if entry_of_cluster in entry.read_bytes().split(b"\0") and pid != os.getpid():
                pids.append(pid)
    return pids


def _stale_directories(parent: Path) -> Iterator[Path]:
    for path in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another start may remove it at the same time
            status = path.lstat()
            if status.st_uid == os.getuid() and not path.is_symlink() and _is_stale(path):
                yield path


def _is_stale(directory: Path) -> bool:
    """Whether the process that created a private directory and its whole cluster have ended."""
    descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return not processes_of(directory)


def _remove_all_but(kept: list[Path], path: Path) -> None:
    if path in kept:
        return
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    elif any(folder.is_relative_to(path) for folder in kept):
        for child in list(path.iterdir()):
            _remove_all_but(kept, child)
    else:
        shutil.rmtree(path, ignore_errors=True)
