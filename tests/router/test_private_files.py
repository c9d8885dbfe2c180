"""Log files of gateways are bounded, including those of exited gateways."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from router.private_files import RotatedFile

KIB = 1024
WRITE = """
import sys
from pathlib import Path
from router.private_files import RotatedFile

file = RotatedFile(Path(sys.argv[1]), max_bytes=1024, buffering=1, others="audit-*.jsonl")
print(flush=True)
sys.stdin.read()
"""


def open_file(folder: Path, name: str) -> RotatedFile:
    path = folder / f"audit-{name}.jsonl"
    return RotatedFile(path, max_bytes=KIB, buffering=1, others="audit-*.jsonl")


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_files_of_ended_gateways_are_bounded(tmp_path: Path) -> None:
    for number in range(8):  # each gateway leaves 1 KiB and a full file before it
        file = open_file(tmp_path, f"gw-{number}")
        for _ in range(2):
            file.append(b"x" * (KIB - 1))
        file.close()
        for path in tmp_path.glob(f"audit-gw-{number}.*"):
            os.utime(path, (number, number))
        total = sum(path.stat().st_size for path in tmp_path.iterdir())
        assert total <= 4 * KIB, "2 KiB of ended gateways, 2 KiB of its own"
    open_file(tmp_path, "gw-new").close()
    assert files(tmp_path) == {"audit-gw-7.jsonl", "audit-gw-7.1.jsonl", "audit-gw-new.jsonl"}


def test_files_of_live_gateways_and_of_others_stay(tmp_path: Path) -> None:
    (tmp_path / "another.jsonl").write_bytes(b"x" * 9 * KIB)
    path = tmp_path / "audit-gw-live.jsonl"
    command = [sys.executable, "-c", WRITE, str(path)]
    live = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert live.stdout is not None
    live.stdout.readline()
    path.write_bytes(b"x" * 9 * KIB)
    current = open_file(tmp_path, "gw-own")
    assert files(tmp_path) == {"another.jsonl", path.name, "audit-gw-own.jsonl"}
    current.append(b"x" * KIB)
    current.turn_over()
    live.kill()
    live.communicate()
    open_file(tmp_path, "gw-new").close()
    kept = {"another.jsonl", "audit-gw-own.jsonl", "audit-gw-own.1.jsonl", "audit-gw-new.jsonl"}
    assert files(tmp_path) == kept
    current.close()
