"""The paced stub behind the real front, and the accounting of CPU time."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from contextlib import aclosing
from pathlib import Path

import msgspec
import numpy as np
import pytest

from cluster.bench.cli import main
from cluster.bench.gateway.paced import PacedConfig, PacedEngine, serve_paced
from cluster.bench.processes import CpuMeter, cpu_seconds, descendants
from worker.front.server import WorkerFrontend
from worker.wire.blocks import block_hashes, root_hash
from worker.wire.messages import (
    Abort,
    AttachSnapshot,
    BlockStored,
    EngineInfo,
    Submit,
    SubmitBatch,
    SubmitReply,
    WorkerItem,
    WorkerUpdate,
)
from worker.wire.sampling import SamplingParams

INFO = EngineInfo(
    model="stub",
    max_model_len=1024,
    max_total_tokens=4096,
    vocab_size=100,
    page_size=4,
    max_num_seqs=8,
    eos_token_ids=[2],
    block_hash_salt="salt",
)
CONFIG = PacedConfig(info=INFO, script=(5, 6, 7), step_s=0.001)


def submit(request_id: str, max_tokens: int, num_prompt: int = 9) -> Submit:
    return Submit(
        request_id=request_id,
        gateway_id="g",
        prompt=np.arange(num_prompt, dtype="<i4").tobytes(),
        sampling=SamplingParams(max_tokens=max_tokens, seed=1),
    )


def test_every_running_request_gets_one_token_per_step() -> None:
    engine = PacedEngine(CONFIG)
    engine.take(SubmitBatch(submits=[submit("a", 2), submit("b", 4)]))
    first, second, third = engine.step(), engine.step(), engine.step()
    assert [(d.request_id, d.token_ids) for d in first.deltas["g"]] == [("a", [5]), ("b", [5])]
    assert [d.finish_reason for d in second.deltas["g"]] == ["length", None]
    assert [(d.request_id, d.token_ids) for d in third.deltas["g"]] == [("b", [7])]
    assert [report.seq for report in (first, second, third)] == [1, 2, 3]
    engine.take(SubmitBatch(aborts=[Abort(request_id="b")]))
    assert engine.idle


def test_prompts_enter_the_prefix_cache() -> None:
    engine = PacedEngine(CONFIG)
    request = submit("a", 2)
    engine.take(SubmitBatch(submits=[request]))
    hashes = block_hashes(request.prompt, 4, root_hash("salt"))
    assert engine.step().block_events == [BlockStored(block_hashes=hashes, parent_hash=None)]
    assert engine.step().block_events == []


async def test_the_stub_serves_the_real_front(tmp_path: Path) -> None:
    front = WorkerFrontend("w", str(tmp_path) if len(str(tmp_path)) < 60 else "/tmp")
    context = multiprocessing.get_context("spawn")
    stub = context.Process(target=serve_paced, args=(CONFIG, front.open()), daemon=True)
    stub.start()
    try:
        await front.wait_ready()
        tokens: dict[str, list[int]] = {"a": [], "b": []}
        finished: set[str] = set()
        async with aclosing(front.attach("g")) as items:
            async for data in items:
                item = msgspec.msgpack.decode(data, type=WorkerItem)
                if isinstance(item, AttachSnapshot):
                    batch = SubmitBatch(submits=[submit("a", 5), submit("b", 3)])
                    reply = await front.submit(msgspec.msgpack.encode(batch))
                    assert msgspec.msgpack.decode(reply, type=SubmitReply).rejections == []
                    continue
                assert isinstance(item, WorkerUpdate)
                for delta in item.deltas:
                    tokens[delta.request_id] += delta.token_ids
                    if delta.finish_reason == "length":
                        finished.add(delta.request_id)
                if finished == {"a", "b"}:
                    break
        assert tokens == {"a": [5, 6, 7, 5, 6], "b": [5, 6, 7]}
    finally:
        front.close()
        stub.kill()
        stub.join(120)


def test_cpu_time_of_descendants_is_counted_by_part() -> None:
    burn = (
        "import sys, time\nprint(0, flush=True)\nwhile time.process_time() < 0.3: pass\n"
        "print(1, flush=True)\nsys.stdin.read()"
    )
    command = [sys.executable, "-c", burn]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"0\n"  # before, it may have no command line yet
        assert child.pid in [pid for pid, _ in descendants()]
        meter = CpuMeter({"burner": (" ".join(command)[:40],)})
        assert child.stdout.readline() == b"1\n"
        assert meter.num_processes() == {"burner": 1}
        assert cpu_seconds(child.pid) >= 0.2
        assert 0.0 <= meter.seconds()["burner"] <= cpu_seconds(child.pid)
        child.communicate(b"")
    with pytest.raises(RuntimeError, match="ended while"):
        meter.seconds()


def test_a_part_without_processes_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="nothing-like-it"):
        CpuMeter({"nothing-like-it": ("nothing-like-it",)})


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (("gateway", "--model", "m", "--output-len", "1"), "--output-len"),
        (("gateway", "--model", "m", "--streams", "0"), "at least 1"),
        (("throughput", "--model", "m", "--max-num-seqs", "0"), "--max-num-seqs"),
        (("throughput", "--model", "m", "--batch-invariant-cost", "--rounds", "2"), "--rounds"),
        (("versus", "--a", "http://a", "--b", "http://b", "--rounds", "1"), "--rounds"),
    ],
)
def test_options_out_of_range_are_explained(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], text: str
) -> None:
    assert main(argv) == 2
    assert text in capsys.readouterr().err
