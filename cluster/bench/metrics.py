"""Metrics of a load from its requests' records, with the names of vLLM's serving benchmark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cluster.bench.client import Record
from cluster.bench.load import LoadResult
from cluster.bench.report import Result, at_most, checks_json, exactly
from cluster.bench.stats import mean, percentile, share, std

METRICS = ("ttft", "tpot", "itl", "e2el")
GOODPUT_METRICS = ("ttft", "tpot", "e2el")
BUSY_CLIENT = 0.8
"""CPU usage of a client process, in cores, above which queueing in the client adds to the
latencies."""

_MAX_ERRORS = 5
_OTHERS = "other errors"


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricOptions:
    """Metrics and percentiles to report, and limits for goodput."""

    percentile_metrics: tuple[str, ...] = field(default=METRICS, metadata={"separator": ","})
    """Comma-separated latency metrics to report."""
    metric_percentiles: tuple[float, ...] = field(
        default=(50.0, 90.0, 99.0), metadata={"separator": ","}
    )
    """Comma-separated percentiles to report for each metric."""
    goodput: Mapping[str, float] | None = field(default=None, metadata={"flag": None})
    """Limits in ms by metric (ttft, tpot, e2el) that a request must meet to count for goodput."""

    def __post_init__(self) -> None:
        for name in self.percentile_metrics:
            if name not in METRICS:
                raise ValueError(
                    f"--percentile-metrics: unknown metric {name!r}: choose from "
                    f"{', '.join(METRICS)}"
                )
        for name in self.goodput or {}:
            if name not in GOODPUT_METRICS:
                raise ValueError(
                    f"--goodput: unknown metric {name!r}: choose from {', '.join(GOODPUT_METRICS)}"
                )


def summarize(load: LoadResult, options: MetricOptions, *, fixed_output: bool) -> Result:
    """Computes the metrics of a load. With `fixed_output`, adds a check that fails if the length of
    an output differs from the requested one."""
    done = [record for record in load.records if not record.error]
    num_input = sum(record.prompt_len for record in done)
    num_output = sum(record.output_len for record in done)
    duration = load.duration_s
    result: Result = {
        "duration": duration,
        "completed": len(done),
        "failed": len(load.records) - len(done),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "total_cached_tokens": sum(record.cached_tokens for record in done),
        "token_hit_rate": share(sum(record.cached_tokens for record in done), num_input),
        "request_throughput": share(len(done), duration),
        "request_goodput": _goodput(done, options.goodput, duration),
        "output_throughput": share(num_output, duration),
        "total_token_throughput": share(num_input + num_output, duration),
        **_latencies(done, options),
        "num_client_processes": load.num_processes,
        "client_cpu_s": load.client_cpu_s,
    }
    workers = Counter(record.worker for record in done if record.worker)
    if workers:
        result["requests_by_worker"] = dict(sorted(workers.items()))
    errors = Counter(record.error for record in load.records if record.error)
    if errors:
        result["errors"] = _grouped(errors)
    result["checks"] = _checks(load, done, fixed_output=fixed_output)
    return result


def detailed(records: Sequence[Record]) -> Result:
    """Latencies in seconds and token counts of each completed request, keyed as in vLLM's detailed
    results."""
    done = [record for record in records if not record.error]
    return {
        "ttfts": [record.ttft for record in done],
        "e2els": [record.latency for record in done],
        "input_lens": [record.prompt_len for record in done],
        "output_lens": [record.output_len for record in done],
    }


def samples_ms(records: Sequence[Record], metric: str) -> list[float]:
    """All values of a metric in ms; itl has many per request."""
    if metric == "itl":
        return [gap * 1000.0 for record in records for gap in record.itl]
    values = (_value_ms(record, metric) for record in records)
    return [value for value in values if value is not None]


def _value_ms(record: Record, metric: str) -> float | None:
    if metric == "ttft":
        return record.ttft * 1000.0
    if metric == "e2el":
        return record.latency * 1000.0
    if record.output_len < 2:
        return None
    return (record.latency - record.ttft) * 1000.0 / (record.output_len - 1)


def _latencies(done: Sequence[Record], options: MetricOptions) -> Result:
    result: Result = {}
    for metric in options.percentile_metrics:
        values = samples_ms(done, metric)
        result[f"mean_{metric}_ms"] = mean(values)
        result[f"median_{metric}_ms"] = percentile(values, 50.0)
        result[f"std_{metric}_ms"] = std(values)
        for q in options.metric_percentiles:
            result[f"p{q:g}_{metric}_ms"] = percentile(values, q)
    return result


def _grouped(errors: Counter[str]) -> dict[str, int]:
    """The most frequent errors, and the number of all others."""
    found = dict(errors.most_common(_MAX_ERRORS))
    others = errors.total() - sum(found.values())
    return {**found, _OTHERS: others} if others else found


def _goodput(
    done: Sequence[Record], goals: Mapping[str, float] | None, duration: float
) -> float | None:
    if not goals:
        return None
    good = 0
    for record in done:
        values = {metric: _value_ms(record, metric) or 0.0 for metric in goals}
        good += all(values[metric] <= limit for metric, limit in goals.items())
    return share(good, duration)


def _checks(load: LoadResult, done: Sequence[Record], *, fixed_output: bool) -> list[Result]:
    busy = share(load.client_cpu_s, load.duration_s * load.num_processes)
    checks = [
        exactly("failed_requests", len(load.records) - len(done), "requests", 0),
        exactly("without_usage", sum(not r.usage_seen for r in done), "requests", 0),
        at_most("client_busy", busy, "cores per process", BUSY_CLIENT),
    ]
    if fixed_output:
        short = sum(record.output_len != record.requested_len for record in done)
        checks.append(exactly("wrong_output_length", short, "requests", 0))
    return checks_json(checks)
