"""`bench job`: stages on a small server, and their result files."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import socket
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cluster.bench.cli import add_commands, main
from cluster.bench.client import Record
from cluster.bench.console import NO_DATA
from cluster.bench.jobs.charts import bar_chart, line_chart
from cluster.bench.jobs.options import JobOptions
from cluster.bench.jobs.slo import MLPERF, find_slo
from cluster.bench.jobs.timeline import pace, timeline
from cluster.bench.machine import machine
from cluster.bench.traces import TraceFile, trace_requests
from cluster.cli.options import given_options
from tests.support.cluster.openai_backend import Backend
from tests.support.paths import ROOT

if TYPE_CHECKING:
    from matplotlib.axes import Axes

JOBS = ROOT / "deploy" / "jobs"
LOAD = "--input-len 12 --output-len 4 --duration 0.5 --ignore-eos --overwrite --json"


def run(
    backend: Backend,
    out: Path,
    kind: str,
    capsys: pytest.CaptureFixture[str],
    *flags: str,
    status: int = 0,
) -> dict[str, Any]:
    """The result file; checks that the last line of output is its summary."""
    command = ["job", kind, "--base-url", backend.url, "--out", str(out), *LOAD.split(), *flags]
    assert main(command) == status
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    written: dict[str, Any] = json.loads((out / "result.json").read_text())
    assert "stages" not in printed
    assert printed["num_requests"] == written["num_requests"]
    page = (out / "report.html").read_text()
    assert page.count("<figure>") >= 3
    for svg in page.split("<figure>")[1:]:
        ElementTree.fromstring("<figure>" + svg.split("</figure>")[0] + "</figure>")
    return written


@pytest.fixture
def no_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips charts, since matplotlib takes longer than a job; other tests draw each type of job
    (goodput as a sweep)."""
    monkeypatch.setattr("cluster.bench.jobs.charts._svg", lambda draw: "<svg/>")


@pytest.fixture
def unrendered_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws charts without layout and SVG, which take most of the time; a soak's are rendered."""
    from matplotlib.figure import Figure

    def draw_only(draw: Callable[[Axes], None]) -> str:
        draw(Figure().add_subplot())
        return "<svg/>"

    monkeypatch.setattr("cluster.bench.jobs.charts._svg", draw_only)


def say(capsys: pytest.CaptureFixture[str], backend: Backend, *flags: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error."""
    command = ["job", *flags, "--base-url", backend.url, *LOAD.split()[:-2]]
    status = main(command)
    output = capsys.readouterr()
    return status, output.out, output.err


def holds(result: dict[str, Any]) -> dict[str, bool]:
    """Checks by name."""
    return {check["name"]: check["holds"] for check in result["checks"]}


@pytest.mark.usefixtures("unrendered_charts")
def test_a_sweep_stops_when_the_endpoint_does_not_keep_up(
    backend: Backend, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backend.pace_s = 0.01  # some 7 events of a request, one at a time: no more than 14 per second
    flags = ("--rate", "8", "--max-concurrency", "1", "--max-stages", "5")
    written = run(backend, tmp_path, "sweep", capsys, *flags)
    rates = [stage["rate"] for stage in written["stages"]]
    assert rates[0] == 8.0
    assert len(rates) < 5
    assert rates[-1] == 0.75 * rates[-2]
    for stage in written["stages"]:
        assert len(stage["ttfts"]) == stage["completed"]


@pytest.mark.usefixtures("no_charts")
def test_a_job_waits_for_a_loading_endpoint(
    backend: Backend, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backend.not_ready = 2
    written = run(backend, tmp_path, "soak", capsys, "--rate", "8", "--wait-ready-s", "60")
    assert written["failed"] == 0
    assert backend.not_ready == -1, "polled until it was ready, and not again"


def test_waiting_for_an_endpoint_times_out(
    backend: Backend, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backend.not_ready = 1000
    flags = ["--out", str(tmp_path / "out"), *LOAD.split(), "--wait-ready-s", "1.5"]
    assert main(["job", "soak", "--base-url", backend.url, *flags]) == 2
    assert (
        "/ready did not return 200 within --wait-ready-s 1.5: HTTP 503" in capsys.readouterr().err
    )
    with socket.socket() as bound:  # nothing listens on it
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        assert main(["job", "soak", "--base-url", url, *flags]) == 2
    assert "refused" in capsys.readouterr().err
    assert backend.bodies == []


@pytest.mark.usefixtures("no_charts")
def test_goodput_finds_the_highest_rate_within_the_slo(
    backend: Backend, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backend.pace_s = 0.01
    flags = ("--rate", "20", "--slo", "400:5", "--max-stages", "2")
    written = run(backend, tmp_path, "goodput", capsys, *flags)
    assert written["goodput_rps"] == 0.0, "10 ms per token is more than 5"
    assert not holds(written)["rates_within_slo"]
    assert [stage["rate"] for stage in written["stages"]] == [20.0, 10.0]


@pytest.mark.usefixtures("unrendered_charts")
def test_shared_prefix_has_a_stage_with_and_without_shared_prefixes(
    backend: Backend, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (
        "--rate 30 --prefix-repetition-prefix-len 8 --prefix-repetition-suffix-len 4 "
        "--prefix-repetition-num-prefixes 2 --prefix-repetition-output-len 3"
    )
    run(backend, tmp_path, "shared-prefix", capsys, *flags.split())
    starts = [tuple(body["prompt"][:8]) for body in backend.bodies]
    assert len(starts) == 30
    assert len(set(starts[:15])) == 2
    assert len(set(starts[15:])) == 15


@pytest.mark.usefixtures("no_charts")
def test_a_repeated_job_has_new_prompts_without_a_seed(
    backend: Backend, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise they would be in the prefix cache of the server."""
    for _ in range(2):
        written = run(backend, tmp_path, "soak", capsys, "--rate", "40")
    run(backend, tmp_path, "soak", capsys, "--rate", "40", "--seed", str(written["seed"]))
    first, second, third = (
        {tuple(body["prompt"]) for body in backend.bodies[20 * turn : 20 * turn + 20]}
        for turn in range(3)
    )
    assert not first & second
    assert second == third


@pytest.mark.usefixtures("unrendered_charts")
def test_a_trace_is_replayed_with_its_lengths_and_blocks(
    backend: Backend, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [(0, 700, 2, [1, 2]), (100, 1030, 3, [1, 3, 4]), (90_000, 5, 5, [9])]
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(json.dumps(dict(zip(names, x, strict=True))) for x in lines))
    run(backend, tmp_path / "out", "mooncake", capsys, "--trace", str(trace))
    prompts = [body["prompt"] for body in backend.bodies]
    assert [len(prompt) for prompt in prompts] == [700, 1030]
    assert prompts[0][:512] == prompts[1][:512]
    assert prompts[0][512:700] != prompts[1][512:700]


def test_a_scaled_trace_keeps_shared_blocks(tmp_path: Path) -> None:
    lines = [(0, 1030, 40, [1, 2, 3]), (1, 1024, 1, [1, 4])]
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(json.dumps(dict(zip(names, x, strict=True))) for x in lines))
    first, second = trace_requests(TraceFile(str(trace)), 1.0, 1.0, length_scale=0.125)
    a, b = first.tokens.tolist(), second.tokens.tolist()
    assert (len(a), len(b)) == (129, 128)
    assert (first.output_len, second.output_len) == (5, 1)
    assert a[:64] == b[:64]
    assert a[64:128] != b[64:]


@pytest.mark.usefixtures("unrendered_charts")
def test_every_scenario_is_a_stage_and_only_mixed_traffic_has_priorities(
    backend: Backend, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = run(backend, tmp_path, "scenario", capsys, "--rate", "40")
    counts = {stage["label"]: stage["completed"] for stage in written["stages"]}
    assert list(counts) == ["steady", "burst", "mixed_priority", "long_short"]
    place = counts["steady"] + counts["burst"]
    assert not any("priority" in body for body in backend.bodies[:place])
    mixed = backend.bodies[place : place + counts["mixed_priority"]]
    assert any("priority" in body for body in mixed)


@pytest.mark.usefixtures("no_charts")
def test_a_soak_reports_failures(
    backend: Backend, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = run(backend, tmp_path, "soak", capsys, "--rate", "40")
    assert holds(written)["failed_requests"]
    assert "p99_ttft_last_over_first_third" in holds(written)
    backend.fail_with = "event"
    broken = run(backend, tmp_path, "soak", capsys, "--rate", "40", status=1)
    assert broken["failed_requests"] == broken["num_requests"] == 20
    assert not holds(broken)["failed_requests"]


REASON = "400: ignore_eos is no field of this server"


@pytest.mark.usefixtures("unrendered_charts")
@pytest.mark.parametrize("kind", ["sweep", "goodput", "soak", "shared-prefix"])
def test_a_job_with_only_failed_requests_reports_reasons_and_no_metrics(
    backend: Backend, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    backend.refuse_ignore_eos = True
    status, out, err = say(capsys, backend, kind, "--rate", "20", "--out", str(tmp_path))
    assert status == 1
    assert f"10 requests failed, all with: HTTP {REASON}" in err
    assert REASON in out
    assert "10 failed" in err
    assert not re.search(r"p99 ttft 0", err)
    written = json.loads((tmp_path / "result.json").read_text())
    assert written["errors"] == {f"HTTP {REASON}": 10}
    assert len(written["stages"]) == 1, "what has never worked is not tried at other rates"
    assert written["stages"][0]["p99_ttft_ms"] is None
    assert written["stages"][0]["token_hit_rate"] is None
    page = (tmp_path / "report.html").read_text()
    assert "Failed requests" in page
    assert f"<td>10</td><td>HTTP {REASON}</td>" in page
    assert "<td>0 ms</td>" not in page
    assert page.count(f"<td>{NO_DATA}</td>") >= 4


@pytest.mark.usefixtures("no_charts")
def test_failures_are_reported_by_reason(
    backend: Backend, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backend.fail_every = 4
    status, out, err = say(capsys, backend, "sweep", "--rate", "40", "--out", str(tmp_path))
    assert status == 0, "a sweep ends where something gives"
    written = json.loads((tmp_path / "result.json").read_text())
    count = written["failed_requests"]
    assert 0 < count < written["num_requests"]
    assert written["errors"] == {"HTTP 503: overloaded": count}
    assert f"{count} requests failed, all with: HTTP 503: overloaded" in err
    assert "HTTP 503: overloaded" in out
    assert "HTTP 503: overloaded" in (tmp_path / "report.html").read_text()


def test_a_report_has_options_machine_versions_and_slo(
    backend: Backend, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--rate", "40", "--slo", "123:45", "--api-key", "secret", "--header", "x-key=hidden")
    written = run(backend, tmp_path, "soak", capsys, *flags)
    options = written["options"]
    assert (options["kind"], options["rate"], options["duration"]) == ("soak", 40.0, 0.5)
    assert (options["random_input_len"], options["random_output_len"]) == (12, 4)
    assert options["ignore_eos"] is True
    assert written["client"]["cores"] >= 1
    assert written["client"]["memory_gib"] > 0.0
    assert written["versions"]["python"] == platform.python_version()
    assert {"rayfleet", "ray", "torch"} <= set(written["versions"])
    page = (tmp_path / "report.html").read_text()
    for text in ("random_input_len", "ignore_eos", "memory_gib", written["client"]["cpu"], "torch"):
        assert text in page
    assert "SLO 123" in page, "on the chart of times to the first token"
    assert "SLO 45" in page
    assert "secret" not in page + json.dumps(written)
    assert "hidden" not in page + json.dumps(written)


def test_gpus_are_read_from_the_driver(tmp_path: Path) -> None:
    for number in range(2):
        folder = tmp_path / f"0000:0{number}:00.0"
        folder.mkdir()
        (folder / "information").write_text("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:  \t 1\n")
    assert machine(str(tmp_path))["gpus"] == "2 x NVIDIA H100 80GB HBM3"
    assert machine(str(tmp_path / "nowhere"))["gpus"] is None


@pytest.mark.usefixtures("no_charts")
def test_results_are_only_overwritten_with_a_flag(
    backend: Backend, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    out = ("--out", str(tmp_path / "kept"))
    assert say(capsys, backend, "soak", "--rate", "20", *out)[0] == 0
    kept = (tmp_path / "kept" / "result.json").read_bytes()
    num_sent = len(backend.bodies)
    status, _, err = say(capsys, backend, "soak", "--rate", "20", *out)
    assert status == 2
    assert "--overwrite" in err
    assert (tmp_path / "kept" / "result.json").read_bytes() == kept
    assert len(backend.bodies) == num_sent, "refused before the load, not after it"
    assert say(capsys, backend, "soak", "--rate", "20", *out, "--overwrite")[0] == 0
    assert (tmp_path / "kept" / "result.json").read_bytes() != kept
    monkeypatch.chdir(tmp_path)
    assert say(capsys, backend, "soak", "--rate", "20")[0] == 0
    assert len(list(tmp_path.glob("rayfleet-job-soak-*/report.html"))) == 1


@pytest.mark.parametrize("path", sorted(JOBS.glob("*.sh")), ids=lambda path: path.stem)
def test_scripts_submit_flags_that_exist(path: Path) -> None:
    command = [str(path), *(["sweep"] if path.stem == "submit" else [])]
    extra = ["--trace", "x.jsonl"] if path.stem == "mooncake" else []
    environment = {**os.environ, "RAY": "echo"}
    result = subprocess.run(
        [*command, *extra], env=environment, capture_output=True, text=True, check=True
    )
    ray, job = result.stdout.split(" -- ")
    assert ray.startswith("job submit --working-dir . --runtime-env deploy/jobs/runtime.yaml")
    assert job.split()[:3] == ["python", "-m", "cluster.bench"]
    parser = argparse.ArgumentParser()
    add_commands(parser.add_subparsers(required=True))
    args = parser.parse_args(job.split()[3:])
    assert JobOptions(**given_options(args, JobOptions)).load_tasks == 2


def test_the_timeline_has_each_token_at_its_time() -> None:
    record = Record(
        index=0, prompt_len=10, requested_len=3, start=5.0, latency=6.0, ttft=1.0, itl=[2.0, 3.0]
    )
    record.output_len, record.cached_tokens = 3, 4
    late = timeline([record], 3.0)
    assert (late["seconds"][-1], late["running"][0]) == (8.0, 0)
    found = timeline([record], 5.0)
    assert sum(found["tokens_per_s"]) * 6.0 / 60 == pytest.approx(3.0)
    assert found["tokens_per_s"][9] > 0.0 or found["tokens_per_s"][10] > 0.0
    assert found["running"][:-1] == [1] * 59
    assert found["running"][-1] == 0
    assert found["hit_rate"] == [0.4] + [None] * 59


@pytest.mark.parametrize(("per_s", "expected"), [(10.0, 1.0), (4.0, 0.4)])
def test_pace_depends_on_completions_and_not_on_latency(per_s: float, expected: float) -> None:
    arrivals = [place / 10.0 for place in range(50)]
    records = [
        Record(index=i, prompt_len=1, requested_len=1, latency=9.0 + i / per_s - i / 10.0, start=at)
        for i, at in enumerate(arrivals)
    ]
    assert pace(records, arrivals) == pytest.approx(expected)
    assert pace(records[:1], arrivals[:1]) == 1.0


def drawn(chart: str) -> list[str]:
    """Texts of a chart, which has to be valid XML."""
    return [text.strip() for text in ElementTree.fromstring(chart).itertext() if text.strip()]


def test_axes_start_at_zero_with_integer_ticks() -> None:
    texts = drawn(line_chart("t<", "x", "y", {"a": [(0.9, 0.7), (31.6, 1013.0)]}))
    assert texts[0] == "t<"
    assert {"0", "10", "1000", "x", "y"} <= set(texts)
    counted = drawn(line_chart("t", "x", "y", {"a": [(1.0, 2.0)]}, whole=True))
    assert {"0", "1", "2"} <= set(counted)
    assert not any(text in counted for text in ("0.5", "1.5"))
    assert drawn(line_chart("t", "x", "y", {"a": [(1.0, math.nan)]})) == ["t", "no data"]


def test_lines_and_limits_are_named() -> None:
    points = {"p50": [(1.0, 31.0), (2.0, 412.0)], "p99": [(1.0, 40.0), (2.0, 0.0)]}
    texts = drawn(line_chart("t", "x", "y", points, log=True, limit=2000.0))
    assert {"p50", "p99", "SLO 2,000"} <= set(texts)


def test_a_histogram_marks_its_limit_unless_it_is_far_away() -> None:
    bars = [(0.0, 1.0), (10.0, 3.0)]
    assert "SLO 30" in drawn(bar_chart("t", "x", "y", bars, limit=30.0))
    far = drawn(bar_chart("t", "x", "y", bars, limit=2000.0))
    assert "SLO 2,000, beyond the axis" in far
    assert "2000" not in far


def test_limits_by_name_and_by_number() -> None:
    assert find_slo("llama2-70b-interactive") == MLPERF["llama2-70b-interactive"]
    assert find_slo("250:30").tpot_ms == 30.0
    with pytest.raises(ValueError, match="llama2-70b"):
        JobOptions(slo="fast")
    with pytest.raises(ValueError, match="--trace"):
        JobOptions(kind="mooncake")
