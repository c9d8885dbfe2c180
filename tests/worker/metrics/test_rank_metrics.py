"""Device metrics of a rank, from a thread of a process without an event loop."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from worker.metrics.node import NodeMetrics

pytestmark = pytest.mark.slow

RANK = """
import sys
from worker.metrics.rank import RankOwner, answer_scrapes, belong_to
if len(sys.argv) > 1:
    belong_to(RankOwner("demo", "w", sys.argv[1]))
answer_scrapes(1, lambda: (2 << 30, 8 << 30))
print(flush=True)
input()
"""


async def test_a_rank_answers_beside_its_worker_for_as_long_as_it_lives(tmp_path: Path) -> None:
    metrics = NodeMetrics("worker w", lambda _: b"", str(tmp_path / "m"))
    await metrics.open()
    rank = subprocess.Popen(
        [sys.executable, "-c", RANK, str(tmp_path / "m")], stdin=subprocess.PIPE
    )
    try:
        async with asyncio.timeout(120):
            while b"rayfleet_gpu_memory" not in (body := (await metrics.gather())[0]):
                await asyncio.sleep(0.05)
        found = {(s.name, s.labels.get("rank")): s for f in parse(body.decode()) for s in f.samples}
        used = found["rayfleet_gpu_memory_used_bytes", "1"]
        assert used.value == 6 << 30
        assert (used.labels["model_name"], used.labels["worker_id"]) == ("demo", "w")
        assert found["rayfleet_gpu_memory_total_bytes", "1"].value == 8 << 30
        assert b'process="rank 1 of worker w"' in body
        text = body.decode()
        assert text.count("rayfleet_event_loop_lag_seconds_count") == 1, "a rank has no loop"
        rank.kill()
        rank.wait()
        assert b"rayfleet_gpu_memory" not in (await metrics.gather())[0]
    finally:
        rank.kill()
        rank.wait()
        metrics.close()


def test_a_rank_without_owner_does_nothing() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", RANK + "\nimport threading\nprint(threading.active_count())"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as rank:
        output, _ = rank.communicate(b"\n", timeout=120)
    assert output.split() == [b"1"]
