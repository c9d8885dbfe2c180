"""Prometheus metrics of a worker."""

from __future__ import annotations

import math

import msgspec
from prometheus_client.parser import text_string_to_metric_families as parse

from tests.support.worker.played_engine import INFO
from worker.metrics.collector import WorkerView, worker_metrics
from worker.metrics.latency import WorkerLatency
from worker.protocol.adapters import AdapterTotals
from worker.protocol.diffusion import BlockTotals
from worker.protocol.exposition import TEXT, render
from worker.protocol.messages import EngineInfo, LoadSnapshot, StepReport, StepShape, TokenDelta
from worker.protocol.speculation import SpeculationTotals
from worker.protocol.times import FirstTokenTimes, StepTimes


def samples(info: EngineInfo | None, load: LoadSnapshot) -> dict[str, float]:
    """Values by name; all have the worker's labels."""
    view = WorkerView("demo", "w", 3, info, load, WorkerLatency())
    text = render(worker_metrics(view), TEXT).decode()
    assert "vllm:" not in text, "unless enabled"
    found = {}
    for family in parse(text):
        assert family.documentation
        for sample in family.samples:
            assert sample.labels["model_name"] == "demo"
            assert sample.labels["worker_id"] == "w"
            found[sample.name.removeprefix("rayfleet_")] = sample.value
    return found


def test_adapters_are_counted_by_memory() -> None:
    info = msgspec.structs.replace(INFO, max_loras=2)
    view = WorkerView("demo", "w", 1, info, LoadSnapshot(), WorkerLatency())
    totals = AdapterTotals(on_device=["a"], on_host=["a", "b"], num_waiting=3, num_loads=4)
    for load, values in ((LoadSnapshot(), (0, 0, 0)), (LoadSnapshot(adapters=totals), (1, 2, 4))):
        text = render(worker_metrics(view._replace(load=load)), TEXT).decode()
        found = {
            sample.labels.get("memory", sample.name): sample.value
            for family in parse(text)
            for sample in family.samples
            if "lora" in sample.name
        }
        assert (found["device"], found["host"], found["rayfleet_lora_loads_total"]) == values
        assert found["rayfleet_num_requests_waiting_for_lora"] == load_waiting(load)
        assert found["rayfleet_lora_slots"] == 2


def load_waiting(load: LoadSnapshot) -> int:
    return 0 if load.adapters is None else load.adapters.num_waiting


def test_gauges_of_the_model_server_protocol_and_of_autoscaling() -> None:
    load = LoadSnapshot(
        num_running=3,
        num_waiting=4,
        num_reserved=2,
        num_free_pages=8,
        num_total_pages=32,
        num_queued_tokens=50,
        queued_prefill_tokens=60,
        reserved_prefill_tokens=7,
        num_preemptions=5,
        num_prefix_queries=90,
        num_prefix_hits=30,
        step_times=StepTimes(num_steps=8, forward=0.5),
    )
    found = samples(INFO, load)
    assert found["num_requests_running"] == 3
    assert found["num_requests_waiting"] == 6
    assert found["kv_cache_usage_perc"] == 0.75
    assert found["num_queued_tokens"] == 50
    assert found["queued_prefill_tokens"] == 67
    assert found["num_preemptions_total"] == 5
    assert found["prefix_cache_queries_total"] == 90
    assert found["prefix_cache_hits_total"] == 30
    assert found["step_forward_seconds_count"] == 8
    assert found["step_forward_seconds_sum"] == 0.5
    assert found["worker_ready"] == 1
    assert found["worker_rebuilds_total"] == 2
    view = WorkerView("demo", "w", 1, INFO, load, WorkerLatency())
    text = render(worker_metrics(view, vllm_names=True), TEXT).decode()
    pages = 'num_cpu_blocks="0",num_gpu_blocks="32"'
    config = f'{{block_size="4",model_name="demo",{pages},worker_id="w"}} 1.0'
    own = '{model_name="demo",worker_id="w"}'
    for prefix in ("rayfleet_", "vllm:"):
        assert f"{prefix}cache_config_info{config}" in text
        assert f"{prefix}num_requests_running{own} 3.0" in text
        assert f"{prefix}num_requests_waiting{own} 6.0" in text
        assert f"{prefix}kv_cache_usage_perc{own} 0.75" in text
    assert text.count("# TYPE vllm:") == 4


def test_disabled_features_count_zero() -> None:
    found = samples(None, LoadSnapshot())
    assert found["worker_ready"] == 0
    assert found["diffusion_tokens_total"] == 0
    assert found["spec_decode_num_drafts_total"] == 0
    assert found["spec_decode_decisions_total"] == 0
    assert not math.isnan(found["kv_cache_usage_perc"])


def test_totals_of_block_diffusion_and_of_speculation() -> None:
    drafts = SpeculationTotals.of(2)
    drafts.add_row(2, 1)
    found = samples(INFO, LoadSnapshot(blocks=BlockTotals(5, 12, 14, 60), speculation=drafts))
    for name, value in (("forwards", 5), ("rounds", 12), ("block_passes", 14), ("tokens", 60)):
        assert found[f"diffusion_{name}_total"] == value
    assert found["spec_decode_num_accepted_tokens_total"] == 1


def report(seq: int, step_ms: float, shape: StepShape, *deltas: TokenDelta) -> StepReport:
    load = LoadSnapshot(step_ms=step_ms, step_shape=shape)
    return StepReport(seq, {"g": list(deltas)}, [], load)


def test_a_worker_reports_step_times_and_ttft() -> None:
    latency = WorkerLatency()
    first = TokenDelta("r", 0, [5], times=FirstTokenTimes(queue_s=0.5, prefill_s=0.25))
    later = TokenDelta("r", 0, [6])
    prefill = StepShape(1, prefill_tokens=64, decode_rows=3)
    latency.add_report(report(1, 40.0, prefill, first, later))
    latency.add_report(report(2, 40.0, prefill))  # no new step
    latency.add_report(report(3, 12.0, StepShape(2, decode_rows=4), later))
    view = WorkerView("demo", "w", 1, INFO, LoadSnapshot(), latency)
    text = render(worker_metrics(view), TEXT).decode()
    found = {
        (s.name, s.labels.get("kind")): s.value
        for family in parse(text)
        for s in family.samples
        if not s.name.endswith("_bucket")
    }
    assert found["rayfleet_worker_time_to_first_token_seconds_sum", None] == 0.75
    assert found["rayfleet_worker_time_to_first_token_seconds_count", None] == 1
    assert found["rayfleet_worker_generation_tokens_total", None] == 3
    for kind, seconds in (("decode", 0.012), ("prefill", 0.04)):
        assert found["rayfleet_worker_step_seconds_sum", kind] == seconds
        assert found["rayfleet_worker_step_seconds_count", kind] == 1


def test_a_rebuilt_rank_group_counts_no_step_before_its_first() -> None:
    latency = WorkerLatency()
    latency.add_report(report(1, 12.0, StepShape(1, decode_rows=4)))
    latency.add_report(report(1, 0.0, StepShape()))  # of the next epoch: a submit was received
    assert sum(latency.prefill_step.counts) == 0
    latency.add_report(report(2, 12.0, StepShape(1, decode_rows=4)))
    assert sum(latency.decode_step.counts) == 2


def test_a_worker_reports_its_engine_and_startup_time() -> None:
    info = msgspec.structs.replace(
        INFO,
        device="cuda",
        dtype="bfloat16",
        tensor_parallel_size=2,
        startup={"load_weights": 30.5, "launch": 4.0},
    )
    for known in (info, None):
        view = WorkerView("demo", "w", 1, known, LoadSnapshot(), WorkerLatency())
        text = render(worker_metrics(view), TEXT).decode()
        found = {s.name: s.labels for family in parse(text) for s in family.samples}
        if known is None:
            assert "rayfleet_engine_info" not in found
            assert "rayfleet_worker_startup_seconds" not in found
            continue
        labels = found["rayfleet_engine_info"]
        assert (labels["model"], labels["device"], labels["dtype"]) == ("tiny", "cuda", "bfloat16")
        assert labels["tensor_parallel_size"] == "2"
        assert 'phase="load_weights",worker_id="w"} 30.5' in text
        assert 'phase="launch",worker_id="w"} 4.0' in text
