"""Threads that decode to a type for the first time do not crash the process."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow
ROUNDS = 100
"""Without `analyzed`, the first few of them crash the process."""
RACE = f"""
import sys, threading, typing, msgspec
from worker.protocol.analyzed import analyzed
sys.setswitchinterval(1e-6)
for number in range({ROUNDS}):
    names = [f"f{{place}}" for place in range(60)]
    hints = [typing.Annotated[int, msgspec.Meta(ge=place)] for place in range(60)]
    kind = msgspec.defstruct(f"Kind{{number}}", list(zip(names, hints)))
    barrier = threading.Barrier(2)
    def convert(kind=kind, values=dict.fromkeys(names, 99), barrier=barrier):
        barrier.wait()
        msgspec.convert(values, TYPE)
    threads = [threading.Thread(target=convert) for _ in range(2)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
"""


def test_two_threads_convert_to_a_new_type() -> None:
    process = subprocess.run([sys.executable, "-c", RACE.replace("TYPE", "analyzed(kind)")])
    assert process.returncode == 0
