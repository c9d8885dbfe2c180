"""What a worker counts, as Prometheus reads it."""

from __future__ import annotations

import math

from prometheus_client.parser import text_string_to_metric_families as parse

from worker.metrics.collector import WorkerCollector, WorkerView
from worker.wire.exposition import TEXT, render
from worker.wire.messages import BlockTotals, EngineInfo, LoadSnapshot
from worker.wire.speculation import SpeculationTotals
from worker.wire.times import StepTimes

INFO = EngineInfo(
    model="tiny",
    max_model_len=64,
    max_total_tokens=128,
    vocab_size=32,
    page_size=4,
    max_num_seqs=8,
    eos_token_ids=[2],
    block_hash_salt="tiny",
)


def samples(info: EngineInfo | None, load: LoadSnapshot) -> dict[str, float]:
    """Values by name; all have the worker's labels."""
    view = WorkerView("demo", "w", 3, info, load)
    text = render(WorkerCollector(lambda: view), TEXT).decode()
    found = {}
    for family in parse(text):
        assert family.documentation
        for sample in family.samples:
            assert sample.labels["model_name"] == "demo"
            assert sample.labels["worker_id"] == "w"
            found[sample.name.removeprefix("rayfleet_")] = sample.value
    return found


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
        step_times=StepTimes(num_steps=8, forward=0.5),
    )
    found = samples(INFO, load)
    assert found["num_requests_running"] == 3
    assert found["num_requests_waiting"] == 6
    assert found["kv_cache_usage_perc"] == 0.75
    assert found["num_queued_tokens"] == 50
    assert found["queued_prefill_tokens"] == 67
    assert found["num_preemptions_total"] == 5
    assert found["step_forward_seconds_count"] == 8
    assert found["step_forward_seconds_sum"] == 0.5
    assert found["worker_ready"] == 1
    assert found["worker_rebuilds_total"] == 2
    text = render(WorkerCollector(lambda: WorkerView("demo", "w", 1, INFO, load)), TEXT).decode()
    config = '{block_size="4",model_name="demo",num_gpu_blocks="32",worker_id="w"} 1.0'
    assert f"rayfleet_cache_config_info{config}" in text


def test_what_a_worker_does_not_do_counts_as_nothing() -> None:
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
