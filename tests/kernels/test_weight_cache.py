"""Packed weights in a cache folder: written once, shared, verified before use, and optional."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from kernels.native import WeightMemory, cached_memory
from tests.support.paths import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")

COUNT = 5 << 20
"""Values of four bytes: three pieces, the last one short."""
HOLD = """
import sys
from pathlib import Path
from kernels.native import cached_memory, weight_cache
weight_cache.private_folder = lambda name: Path(sys.argv[1])
with cached_memory("a", int(sys.argv[2])) as memory:
    print(memory.is_filled, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("kernels.native.weight_cache.private_folder", lambda name: tmp_path)
    return tmp_path


def fill(content: str = "a", count: int = COUNT) -> tuple[bool, torch.Tensor, WeightMemory]:
    """One process: whether it found the values, the values, and their memory."""
    with cached_memory(content, 4 * count) as memory:
        values = memory.take(count, dtype=torch.int32)
        is_filled = memory.is_filled
        if not is_filled:
            torch.arange(count, dtype=torch.int32, out=values)
    assert torch.equal(values, torch.arange(count, dtype=torch.int32))
    return is_filled, values, memory


def files(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.suffix != ".lock"]


def test_what_one_has_packed_others_map(folder: Path) -> None:
    assert [fill()[0], fill()[0], fill("b")[0], fill("a")[0]] == [False, True, False, True]
    assert len(files(folder)) == 2
    assert {path.suffix for path in files(folder)} == {""}


def test_pages_are_shared_between_processes(folder: Path) -> None:
    fill()
    _, values, _ = fill()
    alone = mapped_kb(values)
    command = [sys.executable, "-c", HOLD, str(folder), str(4 * COUNT)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "True\n"
        shared = mapped_kb(values)
        other.communicate("")
    assert other.returncode == 0
    assert alone["Pss"] >= alone["Rss"] - 64 >= 4 * COUNT / 1024 - 64
    assert shared["Pss"] < 0.55 * shared["Rss"]


def mapped_kb(values: torch.Tensor) -> dict[str, int]:
    """Resident memory of the mapping with the values, and this process's share of it."""
    for entry in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        start, end = (int(part, 16) for part in entry.split(maxsplit=1)[0].split("-"))
        if start <= values.data_ptr() < end:
            return {key: int(kb) for key, kb in re.findall(r"^(Rss|Pss): +(\d+) kB", entry, re.M)}
    raise AssertionError("nowhere")


@pytest.mark.parametrize("is_first", [True, False])
def test_nobody_writes_what_others_see(folder: Path, is_first: bool) -> None:
    if not is_first:
        fill()
    _, values, _ = fill()
    child = os.fork()
    if not child:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # of all that this process has
        values[0] = 1
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGSEGV


@pytest.mark.parametrize("damage", ["short", "empty", "first", "last", "sums"])
def test_corrupt_file_is_repacked(
    folder: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    fill()
    (path,) = files(folder)
    place = {"first": 0, "last": 4 * COUNT - 1, "sums": 4 * COUNT + 5}.get(damage)
    if place is None:
        os.truncate(path, 0 if damage == "empty" else 4 * COUNT - 7)
    else:
        with path.open("r+b") as file:
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 4]))
    assert not fill()[0]
    assert f"{path} is corrupt" in caplog.text
    assert fill()[0]


def test_whoever_fails_to_pack_leaves_nothing(folder: Path) -> None:
    with pytest.raises(ValueError, match="no such tensor"), cached_memory("a", 4 * COUNT):
        raise ValueError("no such tensor")
    assert not files(folder)
    assert not fill()[0]


def test_one_packs_while_others_wait(folder: Path) -> None:
    found: list[bool] = []
    with cached_memory("a", 4 * COUNT) as memory:
        others = [threading.Thread(target=lambda: found.append(fill()[0])) for _ in range(3)]
        for other in others:
            other.start()
        assert not found
        torch.arange(COUNT, dtype=torch.int32, out=memory.take(COUNT, dtype=torch.int32))
    for other in others:
        other.join()
    assert found == [True] * 3


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_disk_without_room_is_gone_without(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with largest_file(4 * COUNT):
        assert [fill()[0], fill()[0]] == [False, False]
    assert caplog.text.count("packed weights are not cached") == 2
    assert not files(folder)


def test_a_folder_of_others_is_gone_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kernels.native.weight_cache.build_library", lambda: Path("library"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert [fill()[0], fill()[0]] == [False, True]
    folder = tmp_path / "rayfleet" / "weights"
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    assert not fill()[0]
    assert "must be writable by its owner only" in caplog.text


def test_room_is_made_of_what_nobody_uses(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    count = 1 << 18
    _, _, used = fill("used", count)
    for age, content in ((200, "older"), (100, "newer"), (300, "touched")):
        fill(content, count)
        newest = max(files(folder), key=lambda path: path.stat().st_ctime_ns)
        at = newest.stat().st_mtime - age
        os.utime(newest, (at, at))
    assert fill("touched", count)[0]  # which makes it the youngest
    disk = shutil.disk_usage(folder)
    share = int(4.5 * 4 * count)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk._replace(total=4 * share))
    assert not fill("one more", count)[0]
    assert len(files(folder)) == 4
    assert [fill(name, count)[0] for name in ("newer", "touched", "used")] == [True] * 3
    assert not fill("too large", 6 * count)[0]
    assert "exceed 1/4 of its disk" in caplog.text
    assert len(files(folder)) == 1, "the one in use"
    assert used.is_filled is False
