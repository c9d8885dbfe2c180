"""A worker's Prometheus metrics, read from its frontend's own state when scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from worker.metrics.host_cache import host_cache_metrics
from worker.metrics.latency import WorkerLatency, latency_metrics
from worker.metrics.speculation import speculation_metrics
from worker.wire.diffusion import BlockTotals
from worker.wire.host_cache import HostCacheTotals
from worker.wire.messages import EngineInfo, LoadSnapshot
from worker.wire.speculation import SpeculationTotals
from worker.wire.times import StepTimes

LABELS = ["model_name", "worker_id"]


class WorkerView(NamedTuple):
    """What is known of a worker."""

    model_name: str
    worker_id: str
    epoch: int
    """Counts its rank groups from 1."""
    info: EngineInfo | None
    """None while it is loading."""
    load: LoadSnapshot
    latency: WorkerLatency


_GAUGES: dict[str, tuple[str, Callable[[LoadSnapshot], float]]] = {
    "num_requests_running": ("Requests in the running batch.", lambda x: x.num_running),
    "num_requests_waiting": (
        "Requests waiting at the worker.",
        lambda x: x.num_waiting + x.num_reserved,
    ),
    "num_queued_tokens": ("Tokens of the requests that wait.", lambda x: x.num_queued_tokens),
    "queued_prefill_tokens": (
        "Prompt tokens at the worker that are not computed yet.",
        lambda x: x.queued_prefill_tokens + x.reserved_prefill_tokens,
    ),
    "kv_cache_usage_perc": (
        "KV pages in use, cached ones that may be evicted not counted; 1 is all.",
        lambda x: 1.0 - x.num_free_pages / x.num_total_pages if x.num_total_pages else 0.0,
    ),
    "max_num_seqs": ("Requests that may run at a time.", lambda x: x.max_num_seqs),
    "step_tokens": ("Tokens computed in the last step.", lambda x: x.num_step_tokens),
}
_COUNTERS: dict[str, tuple[str, Callable[[LoadSnapshot], int]]] = {
    "num_preemptions": ("Requests preempted.", lambda x: x.num_preemptions),
    "prefix_cache_queries": (
        "Prompt tokens of requests that were admitted for the first time.",
        lambda x: x.num_prefix_queries,
    ),
    "prefix_cache_hits": ("Tokens of these in the prefix cache.", lambda x: x.num_prefix_hits),
}
_BLOCKS: dict[str, tuple[str, Callable[[BlockTotals], int]]] = {
    "forwards": ("Forward passes of block diffusion.", lambda b: b.num_forwards),
    "rounds": ("Passes that found something to decide, by block.", lambda b: b.num_rounds),
    "block_passes": ("Passes of running blocks, by block.", lambda b: b.num_passes),
    "tokens": ("Tokens of blocks that were done.", lambda b: b.num_tokens),
}
_STEP_PHASES: dict[str, tuple[str, Callable[[StepTimes], float]]] = {
    "schedule": ("Deciding the step.", lambda t: t.schedule),
    "broadcast": ("Sending the step to the ranks.", lambda t: t.broadcast),
    "prepare": ("Rank 0: tables and input tensors.", lambda t: t.prepare),
    "forward": ("Rank 0: the model.", lambda t: t.forward),
    "sample": ("Rank 0: drawing tokens.", lambda t: t.sample),
    "collect": ("Waiting for the step's result.", lambda t: t.collect),
    "process": ("Applying the result.", lambda t: t.process),
    "deliver": ("Between two steps: reports out, requests in.", lambda t: t.deliver),
    "bubble": ("Rank 0 idle before the step while there was work.", lambda t: t.bubble),
}


_PROTOCOL = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
"""What the Gateway API's model server protocol asks for, besides the cache's configuration."""


class WorkerCollector(Collector):
    """Yields all families of one worker; what it does not do counts as 0.

    Counters of the engine begin anew with each rank group, which `worker_rebuilds` counts.

    Args:
        view: what is known of the worker.
        vllm_names: whether the model server protocol's families come as `vllm:`, too.
    """

    def __init__(self, view: Callable[[], WorkerView], *, vllm_names: bool = False) -> None:
        self._view = view
        self._vllm_names = vllm_names

    def collect(self) -> Iterator[Metric]:
        """The families as they stand, for prometheus_client."""
        view = self._view()
        labels, load = [view.model_name, view.worker_id], view.load
        ready = GaugeMetricFamily(
            "rayfleet_worker_ready",
            "1 where it can take requests, 0 while it loads.",
            labels=LABELS,
        )
        ready.add_metric(labels, float(view.info is not None))
        yield ready
        rebuilds = CounterMetricFamily(
            "rayfleet_worker_rebuilds", "Rank groups that were lost and replaced.", labels=LABELS
        )
        rebuilds.add_metric(labels, view.epoch - 1)
        yield rebuilds
        for name, (text, read) in _GAUGES.items():
            gauge = GaugeMetricFamily(f"rayfleet_{name}", text, labels=LABELS)
            gauge.add_metric(labels, read(load))
            yield gauge
        yield _cache_config("rayfleet_cache_config", view)
        if self._vllm_names:
            yield from _under_vllm_names(view)
        yield from (_engine(view), _startup(view))
        yield from latency_metrics(labels, view.latency)
        for name, (text, count) in _COUNTERS.items():
            counter = CounterMetricFamily(f"rayfleet_{name}", text, labels=LABELS)
            counter.add_metric(labels, count(load))
            yield counter
        for name, (text, total) in _BLOCKS.items():
            totals = CounterMetricFamily(f"rayfleet_diffusion_{name}", text, labels=LABELS)
            totals.add_metric(labels, total(load.blocks or BlockTotals()))
            yield totals
        times = load.step_times
        for name, (text, seconds) in _STEP_PHASES.items():
            phase = SummaryMetricFamily(f"rayfleet_step_{name}_seconds", text, labels=LABELS)
            phase.add_metric(labels, times.num_steps, seconds(times))
            yield phase
        yield from speculation_metrics([(labels, load.speculation or SpeculationTotals.of(0))])
        page_size = 0 if view.info is None else view.info.page_size
        yield from host_cache_metrics([(labels, load.host_cache or HostCacheTotals(), page_size)])


def _under_vllm_names(view: WorkerView) -> Iterator[Metric]:
    """For what was written for vLLM: autoscalers' triggers, boards, endpoint pickers."""
    for name in _PROTOCOL:
        text, read = _GAUGES[name]
        gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=LABELS)
        gauge.add_metric([view.model_name, view.worker_id], read(view.load))
        yield gauge
    yield _cache_config("vllm:cache_config", view)


def _engine(view: WorkerView) -> Metric:
    """What it is that serves: a number that differs between two workers often differs for this."""
    family = InfoMetricFamily("rayfleet_engine", "What the worker has loaded.", labels=LABELS)
    if view.info is not None:
        loaded = {
            "model": view.info.model,
            "device": view.info.device,
            "dtype": view.info.dtype,
            "tensor_parallel_size": str(view.info.tensor_parallel_size),
        }
        family.add_metric([view.model_name, view.worker_id], loaded)
    return family


def _startup(view: WorkerView) -> Metric:
    family = GaugeMetricFamily(
        "rayfleet_worker_startup_seconds",
        "What the last start of the rank group consisted of; the phases add up to all of it.",
        labels=[*LABELS, "phase"],
    )
    for phase, seconds in ({} if view.info is None else view.info.startup).items():
        family.add_metric([view.model_name, view.worker_id, phase], seconds)
    return family


def _cache_config(name: str, view: WorkerView) -> Metric:
    """By the labels of the Gateway API's model server protocol."""
    family = InfoMetricFamily(name, "The KV cache.", labels=LABELS)
    if view.info is not None:
        page_size = view.info.page_size
        config = {
            "block_size": str(page_size),
            "num_gpu_blocks": str(
                view.load.num_total_pages or view.info.max_total_tokens // page_size
            ),
            "num_cpu_blocks": str(view.info.num_host_pages),
        }
        family.add_metric([view.model_name, view.worker_id], config)
    return family
