"""Checks of the overload campaign, and its measurement of memory."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import pytest

from cluster.bench.client import Record
from tests.campaigns.overload import OverloadOptions, judge
from tests.support.fleet.memory_watch import MemoryWatch
from tests.support.fleet.processes import resident_mib

OPTIONS = OverloadOptions(factor=4.0)
FLAT = {"gateway": 0.01, "scheduler": -0.2}


def record(status: int = 429, **fields: object) -> Record:
    told: dict[str, Any] = {
        "index": 0,
        "prompt_len": 0,
        "requested_len": 8,
        "output_len": 8 if status == 200 else 0,
        "status": status,
        "retry_after": "3" if status == 429 else "",
        **fields,
    }
    return Record(**told)


def broken(records: list[Record], growth: dict[str, float] | None = None) -> list[str]:
    return [check.name for check in judge(records, growth or FLAT, OPTIONS) if not check.holds]


def test_refusals_that_say_when_to_come_back_are_fine() -> None:
    assert broken([record(200), *[record() for _ in range(3)]]) == []


@pytest.mark.parametrize(
    ("wrong", "names"),
    [
        (record(retry_after=""), ["refused_without_retry_after"]),
        (record(retry_after="0"), ["refused_without_retry_after"]),
        (record(503), ["neither_served_nor_429"]),
        (record(0, error="ConnectionResetError"), ["neither_served_nor_429"]),
        (record(200, error="the stream ended without [DONE]"), ["admitted_unfinished"]),
        (record(200, output_len=7), ["admitted_unfinished"]),
    ],
)
def test_every_other_end_is_named(wrong: Record, names: list[str]) -> None:
    assert broken([record(200), wrong, record(), record()]) == names


def test_too_little_load_and_growing_memory_are_named() -> None:
    assert broken([record(200), record()]) == ["offered_over_served"]
    assert broken([record() for _ in range(4)]) == ["served"]
    four = [record(200), *[record() for _ in range(3)]]
    assert broken(four, {"gateway": 0.2}) == ["gateway_memory_growth"]


def test_memory_is_that_of_the_processes_named() -> None:
    assert resident_mib(os.getpid()) > 10
    hog = "import sys; block = bytearray(60 * 2**20); print('there', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", hog]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        began = time.perf_counter()
        with MemoryWatch({"hog": (" ".join(command[:2]),)}) as memory:
            while not memory.mean_mib(0.0, 60.0)["hog"]:
                assert time.perf_counter() - began < 240.0
                time.sleep(0.05)
        assert memory.mean_mib(0.0, 60.0)["hog"] > 60
        child.communicate(b"")
    assert resident_mib(child.pid) == 0.0
