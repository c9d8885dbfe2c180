"""Rows of `rayfleet top`: rates between scrapes of /metrics, and agent sessions."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client.parser import text_string_to_metric_families

Labels = tuple[tuple[str, str], ...]
BARS: Final = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerRow:
    """State of a worker at a scrape, and its rates since the previous scrape."""

    model: str
    """Name of the worker's model."""
    worker: str
    """ID of the worker."""
    ready: bool
    """Whether the worker is ready for requests."""
    running: int
    """Number of running requests."""
    waiting: int
    """Number of waiting requests."""
    kv_usage: float
    """KV cache usage, 0 to 1."""
    host_usage: float | None
    """Usage of the host memory for KV offloading, 0 to 1; None if offloading is disabled."""
    adapters: int
    """Number of LoRA adapters on the device."""
    adapter_slots: int
    """Maximum number of LoRA adapters on the device; 0 if LoRA is disabled."""
    hit_rate: float | None
    """Prefix cache hit rate of prompt tokens, 0 to 1; None if there were no prompts."""
    tokens_per_s: float
    """Tokens generated per second."""
    ttft_ms: float | None
    """Median time from arrival at the worker to the first token in ms; None if there were no
    tokens."""
    preemptions: int
    """Number of preemptions since the previous scrape."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRow:
    """State of a model at a scrape, and its rates since the previous scrape, both from its
    gateways' metrics."""

    model: str
    """Name of the model."""
    workers_ready: int
    """Number of workers that are ready for requests."""
    workers_wanted: int
    """Target number of workers."""
    pending: int
    """Number of requests at gateways that are not assigned to a worker yet."""
    requests_per_s: float
    """Finished requests per second."""
    tokens_per_s: float
    """Tokens generated per second, including those of unfinished requests."""
    ttft_p50_ms: float | None
    """Median time from arrival at the gateway to the first token in ms; None if there were no
    tokens."""
    ttft_p95_ms: float | None
    """95th percentile of the time from arrival at the gateway to the first token in ms; None if
    there were no tokens."""
    slo_attainment: float | None
    """Fraction of requests with an SLO that met it, 0 to 1; None if there were none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionRow:
    """Agent sessions of a model."""

    model: str
    """Name of the model."""
    live: int
    """Number of sessions with requests in flight, or between requests."""
    waiting: int
    """Number of sessions that wait until workers have room for them."""
    longest_wait_s: float | None
    """Longest time in seconds that a session has been waiting; None if none is waiting."""
    cache_share: float | None
    """Contexts of live sessions as a fraction of the KV cache; None if there are no workers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterRow:
    """A LoRA adapter: workers that have it, and its rates since the previous scrape, from the
    gateways' metrics."""

    model: str
    """Name of the adapter's base model."""
    adapter: str
    """Name of the adapter; `other` for the combined rates of adapters without a separate label."""
    on_device: tuple[str, ...]
    """IDs of the workers that have the adapter on the device."""
    on_host: tuple[str, ...]
    """IDs of the workers that have the adapter in host memory."""
    requests_per_s: float
    """Requests per second."""
    tokens_per_s: float
    """Generated tokens of finished requests per second."""
    ttft_ms: float | None
    """Mean time from arrival at the gateway to the first token in ms, of finished requests; None if
    there were none."""


class Scrape:
    """Metric samples of one point in time, from one or more nodes.

    Args:
        at: monotonic time in seconds.
        texts: /metrics responses of the nodes; a series that several of them contain counts once.
    """

    def __init__(self, at: float, texts: Iterable[str]) -> None:
        self.at = at
        self._samples: dict[str, dict[Labels, float]] = defaultdict(dict)
        self._processes: set[str] = set()
        for text in texts:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    key = tuple(sorted(sample.labels.items()))
                    self._samples[sample.name][key] = sample.value
                    self._processes.add(_process_of(key))

    def beginning(self) -> Scrape:
        """A scrape of the same processes with all counters at zero."""
        empty = Scrape(self.at, ())
        empty._processes = self._processes
        return empty

    def items(self, name: str, **labels: str) -> Iterator[tuple[dict[str, str], float]]:
        """Labels and values of all series with this name whose labels include the given ones."""
        required = labels.items()
        for key, value in self._samples.get(name, {}).items():
            if required <= set(key):
                yield dict(key), value

    def total(self, name: str, **labels: str) -> float:
        """Sum of the values of `items`; 0 if there are none."""
        return sum(value for _, value in self.items(name, **labels))

    def since(self, before: Scrape | None, name: str, **labels: str) -> float:
        """Increase in the selected counters since the scrape `before`, with resets handled as in
        Prometheus; 0 if `before` is None."""
        return sum(grown for _, grown in self._growths(before, name, labels))

    def quantile(self, before: Scrape | None, name: str, q: float, **labels: str) -> float | None:
        """Quantile `q` of a histogram's observations since the scrape `before`, interpolated within
        its buckets; None if there are no observations."""
        counts: dict[float, float] = defaultdict(float)
        for key, grown in self._growths(before, f"{name}_bucket", labels):
            counts[float(dict(key)["le"])] += grown
        return quantile_of(sorted(counts.items()), q)

    def _growths(
        self, before: Scrape | None, name: str, labels: Mapping[str, str]
    ) -> Iterator[tuple[Labels, float]]:
        """Increase in each selected counter, for processes that are also in the scrape `before`.

        Without this restriction, the totals of a process whose node was missing from `before` would
        count as an increase.
        """
        if before is None:
            return
        old, required = before._samples.get(name, {}), labels.items()
        for key, value in self._samples.get(name, {}).items():
            if required <= set(key) and _process_of(key) in before._processes:
                former = old.get(key, 0.0)  # a series may start with its first observation
                yield key, value - former if value >= former else value


def _process_of(key: Labels) -> str:
    """ID of the gateway or worker that exports a series; empty if the series has neither label."""
    labels = dict(key)
    return labels.get("gateway_id") or labels.get("worker_id", "")


def quantile_of(counts: Sequence[tuple[float, float]], q: float) -> float | None:
    """Quantile `q` from cumulative counts by upper bound, as Prometheus' histogram_quantile does;
    None if there are no counts."""
    if not counts or counts[-1][1] <= 0.0:
        return None
    rank = q * counts[-1][1]
    low, below = 0.0, 0.0
    for bound, count in counts:
        if count >= rank:
            if math.isinf(bound):
                return low
            share = (rank - below) / (count - below) if count > below else 1.0
            return low + (bound - low) * share
        low, below = bound, count
    return low


def worker_rows(before: Scrape | None, now: Scrape) -> list[WorkerRow]:
    """Rows of all workers in a scrape, sorted by model and id."""
    rows = [_worker_row(before, now, label) for label, _ in now.items("rayfleet_worker_ready")]
    return sorted(rows, key=lambda row: (row.model, row.worker))


def model_rows(before: Scrape | None, now: Scrape) -> list[ModelRow]:
    """Rows of all models in a scrape, sorted by name."""
    names = {label["model_name"] for label, _ in now.items("rayfleet_num_workers_ready")}
    return [_model_row(before, now, name) for name in sorted(names)]


def adapter_rows(before: Scrape | None, now: Scrape) -> list[AdapterRow]:
    """Rows of the LoRA adapters in a scrape that have had requests or are in the memory of workers,
    sorted by model and name."""
    used = {
        (label["model_name"], label["lora_adapter"])
        for name in ("rayfleet_lora_requests_total", "rayfleet_lora_resident")
        for label, value in now.items(name)
        if value
    }
    return [_adapter_row(before, now, *names) for names in sorted(used)]


def session_rows(response: Mapping[str, Any]) -> list[SessionRow]:
    """Rows of the models in a response to GET /sessions, in the same order."""
    waits = defaultdict[str, list[float]](list)
    for session in response["data"]:
        if session["state"] == "waiting":
            waits[session["model"]].append(session["state_s"])
    return [
        SessionRow(
            model=model["id"],
            live=model["live"],
            waiting=model["waiting"],
            longest_wait_s=max(waits[model["id"]], default=None),
            cache_share=(
                model["live_tokens"] / model["cache_tokens"] if model["cache_tokens"] else None
            ),
        )
        for model in response["models"]
    ]


def sparkline(values: Sequence[float]) -> str:
    """One bar per value, relative to the maximum; the lowest bars if no value is above 0."""
    top = max(values, default=0.0)
    if top <= 0.0:
        return BARS[0] * len(values)
    return "".join(BARS[min(int(value / top * len(BARS)), len(BARS) - 1)] for value in values)


def _worker_row(before: Scrape | None, now: Scrape, labels: Mapping[str, str]) -> WorkerRow:
    key = {"model_name": labels["model_name"], "worker_id": labels["worker_id"]}
    queries = now.since(before, "rayfleet_prefix_cache_queries_total", **key)
    hits = now.since(before, "rayfleet_prefix_cache_hits_total", **key)
    tokens = now.since(before, "rayfleet_worker_generation_tokens_total", **key)
    cache = [label for label, _ in now.items("rayfleet_cache_config_info", **key)]
    has_host = any(label.get("num_cpu_blocks", "0") != "0" for label in cache)
    first = now.quantile(before, "rayfleet_worker_time_to_first_token_seconds", 0.5, **key)
    return WorkerRow(
        model=key["model_name"],
        worker=key["worker_id"],
        ready=now.total("rayfleet_worker_ready", **key) > 0,
        running=int(now.total("rayfleet_num_requests_running", **key)),
        waiting=int(now.total("rayfleet_num_requests_waiting", **key)),
        kv_usage=now.total("rayfleet_kv_cache_usage_perc", **key),
        host_usage=now.total("rayfleet_cpu_cache_usage_perc", **key) if has_host else None,
        adapters=int(now.total("rayfleet_lora_adapters", memory="device", **key)),
        adapter_slots=int(now.total("rayfleet_lora_slots", **key)),
        hit_rate=min(hits / queries, 1.0) if queries else None,
        tokens_per_s=_rate(tokens, before, now),
        ttft_ms=_ms(first),
        preemptions=int(now.since(before, "rayfleet_num_preemptions_total", **key)),
    )


def _model_row(before: Scrape | None, now: Scrape, model: str) -> ModelRow:
    ended = now.since(before, "rayfleet_request_success_total", model_name=model)
    tokens = now.since(before, "rayfleet_generation_tokens_total", model_name=model)
    met = now.since(before, "rayfleet_slo_requests_total", model_name=model, met="true")
    missed = now.since(before, "rayfleet_slo_requests_total", model_name=model, met="false")
    name = "rayfleet_time_to_first_token_seconds"
    targets = [v for _, v in now.items("rayfleet_num_workers_wanted", model_name=model)]
    ready = [v for _, v in now.items("rayfleet_num_workers_ready", model_name=model)]
    return ModelRow(
        model=model,
        workers_ready=int(max(ready, default=0)),
        workers_wanted=int(max(targets, default=0)),
        pending=int(now.total("rayfleet_gateway_pending_requests", model_name=model)),
        requests_per_s=_rate(ended, before, now),
        tokens_per_s=_rate(tokens, before, now),
        ttft_p50_ms=_ms(now.quantile(before, name, 0.5, model_name=model)),
        ttft_p95_ms=_ms(now.quantile(before, name, 0.95, model_name=model)),
        slo_attainment=met / (met + missed) if met + missed else None,
    )


def _adapter_row(before: Scrape | None, now: Scrape, model: str, adapter: str) -> AdapterRow:
    labels = {"model_name": model, "lora_adapter": adapter}

    def since(name: str) -> float:
        return now.since(before, f"rayfleet_lora_{name}", **labels)

    def workers(memory: str) -> tuple[str, ...]:
        found = now.items("rayfleet_lora_resident", memory=memory, **labels)
        return tuple(sorted({label["worker_id"] for label, _ in found}))  # all gateways report them

    first_tokens = since("time_to_first_token_seconds_count")
    seconds = since("time_to_first_token_seconds_sum")
    return AdapterRow(
        model=model,
        adapter=adapter,
        on_device=workers("device"),
        on_host=workers("host"),
        requests_per_s=_rate(since("requests_total"), before, now),
        tokens_per_s=_rate(since("generation_tokens_total"), before, now),
        ttft_ms=_ms(seconds / first_tokens) if first_tokens else None,
    )


def _rate(grown: float, before: Scrape | None, now: Scrape) -> float:
    seconds = 0.0 if before is None else now.at - before.at
    return grown / seconds if seconds > 0.0 else 0.0


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3
