"""Private directories of fleets in /tmp: made at the start, removed at the end or by a later start.

Each holds a lock file, locked for as long as the process that made it lives. A directory whose lock
is free, and that no process has in its environment, is left over.
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
"""Variable with the private directory, in the environment of every process of a local cluster."""

_PARENT = Path("/tmp")
_PREFIX = "rf-"
_LOCK = "owner.lock"


def private_directory(parent: Path = _PARENT) -> Path:
    """A new directory of mode 0700, locked until this process ends. Removes what ended fleets left.

    Its path is short, as a Unix socket's may have 107 bytes.
    """
    remove_left_directories(parent)
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    # HAZARD: a lock file that is not locked yet would be taken for a left one: it gets its name
    # when it is locked. Nothing closes the descriptor: it is to last as long as the process.
    new = directory / f"{_LOCK}.new"
    descriptor = os.open(new, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    new.rename(directory / _LOCK)
    return directory


def ray_directory(directory: Path) -> Path:
    """Folder of a local cluster's Ray for sockets, logs and spilled objects.

    Ray makes this folder writable for everyone, /tmp/ray by default: other users of the machine
    could replace sockets by their own. Within the private `directory` they cannot reach it.
    """
    return directory / "ray"


def remove_private_directory(directory: Path, *, keep_logs: bool = False) -> None:
    """Removes a private directory; with `keep_logs` all but Ray's logs, as after a failed start."""
    kept = []
    if keep_logs:
        kept = list(ray_directory(directory).glob("session_[0-9]*/logs"))
        kept += [directory / _LOCK] if kept else []
    _remove_all_but(kept, directory)


def remove_left_directories(parent: Path = _PARENT) -> None:
    """Removes the directories of this user's ended fleets, except for the Ray logs of that which
    started last."""
    left = sorted(_left_directories(parent), key=lambda path: (path / _LOCK).stat().st_mtime)
    with_logs = [path for path in left if ray_directory(path).is_dir()]
    for path in left:
        remove_private_directory(path, keep_logs=path in with_logs[-1:])


def processes_of(directory: Path) -> list[int]:
    """Ids of the processes of the local cluster with this private directory, this one left out.

    HAZARD: psutil reads an environment up to its first empty entry, and Ray, which writes process
    titles over it, leaves empty ones.
    """
    wanted = f"{DIRECTORY_VARIABLE}={directory}".encode()
    pids = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            pid = int(entry.parent.name)
            if wanted in entry.read_bytes().split(b"\0") and pid != os.getpid():
                pids.append(pid)
    return pids


def _left_directories(parent: Path) -> Iterator[Path]:
    for path in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another start may remove it at the same time
            status = path.lstat()
            if status.st_uid == os.getuid() and not path.is_symlink() and _is_left(path):
                yield path


def _is_left(directory: Path) -> bool:
    """Whether the process that made a private directory has ended, and all of its cluster."""
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
