"""Processes started by a test end when the test's process is killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid

from tests.support.paths import ROOT
from tests.support.reaper import marked

STARTS = """
import os, subprocess, sys, time
from tests.support.reaper import kill_with_this_process

name, value = sys.argv[1].split("=")
kill_with_this_process(sys.argv[1])
environment = os.environ | {name: value}
subprocess.Popen(["sleep", "600"], env=environment, start_new_session=True)
print("started", flush=True)
time.sleep(600)
"""


def test_processes_end_with_the_tests_that_started_them() -> None:
    mark = f"RAYFLEET_TEST_REAPER={uuid.uuid4()}"
    tests = subprocess.Popen(
        [sys.executable, "-c", STARTS, mark], cwd=ROOT, stdout=subprocess.PIPE, env=os.environ
    )
    assert tests.stdout is not None
    assert tests.stdout.readline() == b"started\n"
    assert len(list(marked(mark))) == 1
    tests.kill()
    tests.wait()
    deadline = time.monotonic() + 60
    while list(marked(mark)):
        assert time.monotonic() < deadline, "the process was not killed"
        time.sleep(0.05)
