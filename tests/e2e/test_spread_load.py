"""A benchmark job with load from Ray processes, as for submitted jobs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fleet.running_fleet import API_KEY, DEADLINE_S, RunningFleet


@pytest.mark.long  # tests/cluster/bench/test_bench_spread.py has the same without Ray
def test_load_generators_of_ray_send_every_request(
    fleet: RunningFleet, tiny_chat_model: Path, tmp_path: Path
) -> None:
    job = (
        "job soak --rate 24 --duration 1 --input-len 8 --output-len 4 --ignore-eos --load-tasks 2 "
        f"--base-url {fleet.base_url} --api-key {API_KEY} --out {tmp_path} --json "
        f"--tokenizer {tiny_chat_model}"
    )
    address, environment = fleet.ray()
    done = subprocess.run(
        [sys.executable, "-m", "cluster.bench", *job.split()],
        env=environment | {"RAY_ADDRESS": address},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert (report["num_requests"], report["failed_requests"]) == (24, 0)
    (stage,) = json.loads((tmp_path / "result.json").read_text())["stages"]
    assert stage["num_client_processes"] == 2
    assert stage["output_lens"] == [4] * 24
    # Both started at the agreed time, not one after the other.
    assert 1.0 <= stage["duration"] < DEADLINE_S
    assert "<svg" in (tmp_path / "report.html").read_text()
