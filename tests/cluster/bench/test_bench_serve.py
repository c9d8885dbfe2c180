"""The load client against a server with known counts. Counts and fields only, never speeds."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from cluster.bench.cli import main
from cluster.bench.client import Record
from cluster.bench.console import NO_DATA
from cluster.bench.load import LoadResult
from cluster.bench.metrics import MetricOptions, summarize

if TYPE_CHECKING:
    from tests.support.cluster.openai_backend import Backend

COUNTS = {"duration", "completed", "failed", "total_input_tokens", "total_output_tokens"}
RATES = {"request_throughput", "output_throughput", "total_token_throughput"}
LATENCIES = {
    f"{statistic}_{metric}_ms"
    for statistic in ("mean", "median", "std", "p50", "p90", "p99")
    for metric in ("ttft", "tpot", "itl", "e2el")
}


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any]]:
    status = main([*argv, "--json"])
    return status, json.loads(capsys.readouterr().out)


def serve(
    capsys: pytest.CaptureFixture[str], backend: Backend, *argv: str
) -> tuple[int, dict[str, Any]]:
    shape = ("--input-len", "20", "--output-len", "6", "--num-prompts", "10")
    return run(capsys, "serve", "--base-url", backend.url, *shape, *argv)


def test_counts_come_from_usage(backend: Backend, capsys: pytest.CaptureFixture[str]) -> None:
    status, result = serve(capsys, backend, "--max-concurrency", "4", "--ignore-eos")
    assert status == 0
    assert set(result) >= COUNTS | RATES | LATENCIES
    assert (result["completed"], result["failed"]) == (10, 0)
    assert result["total_input_tokens"] == 200
    assert result["total_output_tokens"] == 60
    assert result["total_cached_tokens"] == 30
    assert result["token_hit_rate"] == pytest.approx(0.15)
    assert result["requests_by_worker"] == {"w0": 10}
    assert result["model_id"] == "toy"
    assert 1 <= backend.most_running <= 4
    assert all(
        set(check) == {"name", "value", "unit", "goal", "holds"} for check in result["checks"]
    )
    body = backend.bodies[0]
    assert body["ignore_eos"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert len(body["prompt"]) == 20


def test_embeddings(backend: Backend, capsys: pytest.CaptureFixture[str]) -> None:
    status, result = serve(capsys, backend, "--task", "embed")
    assert status == 0
    assert (result["completed"], result["failed"]) == (10, 0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (200, 0)
    assert result["endpoint"] == "/v1/embeddings"
    assert all(set(body) == {"model", "input", "encoding_format"} for body in backend.bodies)


def test_events_are_counted_without_usage(
    backend: Backend, capsys: pytest.CaptureFixture[str]
) -> None:
    backend.with_usage = False
    _, result = serve(capsys, backend)
    assert result["total_output_tokens"] == 60
    (check,) = [check for check in result["checks"] if check["name"] == "without_usage"]
    assert (check["value"], check["holds"]) == (10, False)


def test_warmups_are_not_measured(backend: Backend, capsys: pytest.CaptureFixture[str]) -> None:
    _, result = serve(capsys, backend, "--num-warmups", "3")
    assert result["completed"] == 10
    assert len(backend.bodies) == 13
    prompts = [tuple(body["prompt"]) for body in backend.bodies]
    assert len(set(prompts)) == 13


def test_chat_and_key(backend: Backend, capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    backend.api_key = "secret"
    folder = str(make_tokenizer(tmp_path))
    chat = ("--endpoint", "chat", "--tokenizer", folder, "--header", "x-user=u1")
    status, result = serve(capsys, backend, *chat, "--api-key", "secret")
    assert status == 0
    assert result["total_output_tokens"] == 60
    assert result["total_input_tokens"] == 200
    assert backend.headers[0]["x-user"] == "u1"
    status, result = serve(capsys, backend, *chat, "--api-key", "wrong")
    assert (status, result["failed"], result["completed"]) == (1, 10, 0)


@pytest.mark.parametrize(
    ("fault", "text"), [("status", "HTTP 401"), ("event", "worker died"), ("cut", "[DONE]")]
)
def test_failures_are_counted(
    backend: Backend, capsys: pytest.CaptureFixture[str], fault: str, text: str
) -> None:
    backend.fail_with = fault
    status, result = serve(capsys, backend)
    assert (status, result["failed"]) == (1, 10)
    assert text in next(iter(result["errors"]))
    assert {result[name] for name in LATENCIES} == {None}, "no data is not 0 ms"
    assert result["token_hit_rate"] is None


def test_the_console_shows_reasons_of_failures_and_no_metrics_without_data(
    backend: Backend, capsys: pytest.CaptureFixture[str]
) -> None:
    backend.fail_with = "status"
    assert main(["serve", "--base-url", backend.url, "--num-prompts", "4"]) == 1
    output = capsys.readouterr()
    assert "4 requests failed, all with: HTTP 401: no" in output.err
    assert "failed requests" in output.out
    assert re.search(rf"ttft(\W+{NO_DATA}){{3}}", output.out)


def test_unknown_servers_need_a_tokenizer(
    backend: Backend, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    plain = ("serve", "--base-url", backend.url, "--num-prompts", "2")
    backend.owned_by = "somebody"
    assert main([*plain]) == 2
    assert "--tokenizer" in capsys.readouterr().err
    assert not backend.bodies
    folder = str(make_tokenizer(tmp_path))
    assert main([*plain, "--tokenizer", folder, "--prompt-format", "text"]) == 0
    assert isinstance(backend.bodies[0]["prompt"], str)
    backend.owned_by = "vllm"
    assert main([*plain]) == 0
    assert "token IDs 100 to 999" in capsys.readouterr().err


def test_endpoints_without_data_are_not_compared(
    backend: Backend, capsys: pytest.CaptureFixture[str]
) -> None:
    backend.fail_with = "status"
    flags = ("--concurrencies", "1", "--pause-s", "0", "--rounds", "3", "--num-prompts", "2")
    assert main(["compare", backend.url, backend.url, *flags]) == 2
    output = capsys.readouterr().err
    assert "has no completed requests: 6 requests failed, all with: HTTP 401: no" in output


def test_several_processes_share_the_load(
    backend: Backend, capsys: pytest.CaptureFixture[str]
) -> None:
    pace = ("--max-concurrency", "3", "--request-rate", "500", "--burstiness", "inf")
    _, result = serve(capsys, backend, "--num-processes", "2", *pace)
    assert result["completed"] == 10
    assert result["num_client_processes"] == 2
    assert (result["request_rate"], result["burstiness"]) == (500.0, "inf")
    assert result["duration"] >= 10 / 500.0, "from the start, not from the first request"
    assert backend.most_running <= 3
    assert len({tuple(body["prompt"]) for body in backend.bodies}) == 10


def test_goodput_counts_requests_that_meet_every_limit() -> None:
    records = [
        Record(index=i, prompt_len=4, requested_len=3, latency=e2e, ttft=ttft, output_len=3)
        for i, (ttft, e2e) in enumerate([(0.1, 0.3), (0.3, 0.5), (0.1, 2.1)])
    ]
    load = LoadResult(
        records=records, start_s=0.0, duration_s=2.0, client_cpu_s=0.0, num_processes=1
    )
    options = MetricOptions(goodput={"ttft": 200.0, "tpot": 500.0})
    result = summarize(load, options, fixed_output=True)
    assert result["request_goodput"] == 0.5  # the first request only
    assert result["median_tpot_ms"] == pytest.approx(100.0)
    assert result["p50_e2el_ms"] == pytest.approx(500.0)


@pytest.mark.parametrize("same_server", [False, True])
def test_endpoints_take_turns_and_get_new_prompts(
    backend: Backend, capsys: pytest.CaptureFixture[str], same_server: bool
) -> None:
    other = backend.url if same_server else backend.url.replace("127.0.0.1", "localhost")
    shape = ("--input-len", "8", "--output-len", "2", "--prompts-per-stream", "2")
    turns = ("--concurrencies", "1,3", "--pause-s", "0", "--rounds", "3", "--tolerance", "0.9")
    _, result = run(capsys, "compare", backend.url, other, *shape, *turns)
    assert {row["stage"] for row in result["rows"]} == {"1 at once", "3 at once"}
    assert {row["runs"] for row in result["rows"]} == {"3 pairs"}
    assert "output_throughput" in {row["figure"] for row in result["rows"]}
    assert [check["name"] for check in result["checks"]][-1] == "failed_requests"
    # Both sides get the same prompts, once; a server compared with itself sees none again.
    prompts = [tuple(body["prompt"]) for body in backend.bodies]
    assert len(prompts) == 2 * 3 * (2 + 6)
    assert all(prompts.count(prompt) == (1 if same_server else 2) for prompt in prompts)


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (("--goodput", "ttft=3"), "METRIC:MS"),
        (("--goodput", "itl:3"), "--goodput"),
        (("--percentile-metrics", "ttft,speed"), "speed"),
        (("--request-rate", "0"), "--request-rate"),
        (("--endpoint", "/v2"), "--endpoint"),
        (("--header", "nothing"), "KEY=VALUE"),
        (("--prompt-format", "text"), "--tokenizer"),
    ],
)
def test_wrong_flags_are_explained(
    backend: Backend, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], text: str
) -> None:
    assert main(["serve", "--base-url", backend.url, "--num-prompts", "1", *argv]) == 2
    assert text in capsys.readouterr().err


def test_a_table_is_printed_without_json(
    backend: Backend, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--base-url", backend.url, "--num-prompts", "2"]) == 0
    out = capsys.readouterr().out
    assert "output_throughput" in out
    assert "failed_requests" in out


def make_tokenizer(folder: Any) -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = {"unk": 0, **{f"w{i}": i for i in range(1, 300)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="unk"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
