"""Replay of a gateway's decision log."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from deploy.benchmarks.cli import main
from deploy.benchmarks.routing.replay import recorded_workload
from router.explain import DecisionLine, DecisionLog, LogLine, WorkerSeen, read_decisions
from router.fleet import Fleet
from worker.protocol.blocks import block_hash_array

PAGE = 16


def decided(number: int, blocks: list[int]) -> DecisionLine:
    return DecisionLine(
        request_id=f"r{number}",
        at=100.0 + 0.5 * number,
        num_tokens=len(blocks) * PAGE + 5,
        num_output=4,
        page_size=PAGE,
        hashes=np.array(blocks, "<u8").tobytes(),
        session="",
        worker_id="a",
        attempt=0,
        hit_tokens=0,
        achievable_hit_tokens=0,
        pooled_hit_tokens=0,
        cached_tokens=PAGE,
        predicted_s=0.1,
        first_token_s=0.2 + number,
        regret_s=0.0,
    )


def lines() -> list[LogLine]:
    workers = [
        WorkerSeen(
            worker_id=name, page_size=PAGE, num_pages=64, max_num_seqs=4, max_num_batched_tokens=64
        )
        for name in ("a", "b")
    ]
    return [*workers, decided(1, [5, 9, 11]), decided(0, [5, 9, 2**63 + 1])]


def test_requests_come_back_with_their_times_and_common_blocks() -> None:
    workload = recorded_workload(lines())
    assert len(workload.fleet.slowness) == 2
    assert (workload.fleet.page_size, workload.fleet.num_pages) == (PAGE, 64)
    first, second = workload.arrivals
    assert first.at == 0.0
    assert second.at == pytest.approx(0.5)
    assert first.num_tokens == 3 * PAGE + 5
    a, b = (block_hash_array(x.tokens, PAGE, 1) for x in (first, second))
    assert (a == b).tolist() == [True, True, False]


def test_command_compares_policies_with_what_was(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    log = DecisionLog(str(tmp_path), "model/name", "gw", max_bytes=1 << 20)
    for line in lines():
        if isinstance(line, DecisionLine):
            log.decided(line, Fleet())
        else:
            log._write(line)
    log.close(Fleet())
    assert len(list(read_decisions(str(tmp_path)))) == 4
    routers = ["--policy", "adaptive", "--policy", "round-robin"]
    assert main(["router", "--json", "--replay", str(tmp_path), *routers]) == 0
    result = json.loads(capsys.readouterr().out)
    was, *replayed = result["rows"]
    assert was["mean_ttft_s"] == pytest.approx(0.7)
    assert was["hit_rate"] == pytest.approx(2 * PAGE / (2 * (3 * PAGE + 5)))
    assert [row["policy"] for row in replayed] == ["adaptive", "round-robin"]
    assert replayed[0]["hit_rate"] > replayed[1]["hit_rate"] == 0.0


def test_a_log_without_workers_is_refused() -> None:
    with pytest.raises(ValueError, match="no worker"):
        recorded_workload([decided(0, [1])])
