"""`rayfleet bench job`: sends stages of load to an endpoint; writes result.json and report.html."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cluster.bench.console import readable
from cluster.bench.datasets import DatasetOptions
from cluster.bench.jobs.options import JobOptions
from cluster.bench.jobs.page import write_page
from cluster.bench.jobs.slo import Slo, find_slo
from cluster.bench.jobs.stages import Stage, StageMaker
from cluster.bench.jobs.timeline import pace, timeline
from cluster.bench.load import Load, LoadResult, choose_processes, run_load
from cluster.bench.machine import machine, versions
from cluster.bench.metrics import BUSY_CLIENT, MetricOptions, detailed, summarize
from cluster.bench.report import (
    Result,
    at_least,
    at_most,
    checks_json,
    count_errors,
    exactly,
    json_ready,
    note,
)
from cluster.bench.serve import ServeOptions, load_of, load_setting, resolve, server_version
from cluster.bench.stats import percentile, share

_FOLLOWS = 0.9
"""Minimum ratio of completed to offered rate for a sweep to continue."""
_KEEPS_UP = 0.5
"""Minimum ratio of completed to offered rate for a stage to count as within the SLO."""
_NARROW = 1.1
"""Ratio of the upper to the lower bound on the goodput at which the search for it ends."""
_DRIFT = 1.5
"""Maximum ratio of the p99 TTFT in a soak's last third to that in its first."""
_POLL_S = 1.0
"""Interval between requests to /ready in seconds."""
_READY_TIMEOUT_S = 10.0
"""Timeout of a request to /ready in seconds."""
_DATA, _PAGE = "result.json", "report.html"

Play = Callable[[Stage], Result]


def run_job(options: JobOptions, serve: ServeOptions) -> Result:
    """Runs a job's stages and writes its files. Unlike result.json, the result has no samples.

    Raises:
        ValueError: the endpoint is not reachable or not ready in time, or the folder is not
            writable.
    """
    folder = _open_folder(options)
    if options.wait_ready_s:
        _wait_ready(serve.base_url.rstrip("/") + "/ready", options.wait_ready_s)
    serve, space = resolve(serve)
    maker = StageMaker(options, serve, space)
    run, close = _runner(options)
    slo = find_slo(options.slo)

    def play(stage: Stage) -> Result:
        found = _figures(stage, run(load_of(serve, stage.requests)), serve, slo)
        note(
            f"{stage.label}: {found['request_throughput']:.2f} req/s, p99 ttft "
            f"{readable(found['p99_ttft_ms'])} ms, {found['failed']} failed"
            + "".join(f" ({reason})" for reason in list(found.get("errors", ()))[:1])
        )
        return found

    try:
        stages = list(_until_all_fail(_stages(options, maker, play)))
    finally:
        close()
    result: Result = {
        "job": options.kind,
        "model_id": serve.model,
        "base_url": serve.base_url,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": serve.seed,
        "slo_ttft_ms": slo.ttft_ms,
        "slo_tpot_ms": slo.tpot_ms,
        **_summary(options, stages),
        "options": _setting(options, serve),
        "server_version": server_version(serve),
        "client": machine(),
        "versions": versions(),
    }
    return _write(folder, result, stages)


def _open_folder(options: JobOptions) -> Path:
    """Folder for the results, created before the load starts, so that a job of half an hour does
    not fail at its end.

    Raises:
        ValueError: the folder cannot be created, or already contains results.
    """
    folder = Path(options.out or f"rayfleet-job-{options.kind}-{datetime.now():%Y%m%d-%H%M%S}")
    existing = [name for name in (_DATA, _PAGE) if (folder / name).exists()]
    if existing and not options.overwrite:
        raise ValueError(
            f"--out {folder} already contains {' and '.join(existing)}: use another folder, or "
            "--overwrite"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot create --out {folder}: {error.strerror or error}") from error
    return folder


def _setting(options: JobOptions, serve: ServeOptions) -> Result:
    """Options of the job and its load that affect the measurement."""
    excluded = {"out", "overwrite", "wait_ready_s", "request_rate"}
    if options.kind != "mooncake":
        excluded |= {"trace", "speed", "length_scale"}
    if options.kind in ("mooncake", "scenario"):  # these do not use the dataset
        excluded |= {f.name for f in fields(DatasetOptions)}
    if options.kind == "shared-prefix":
        dataset = replace(serve.dataset, dataset_name="prefix_repetition")
        serve = replace(serve, dataset=dataset)
    settings = asdict(options) | load_setting(serve)
    return {name: value for name, value in settings.items() if name not in excluded}


def _until_all_fail(stages: Iterable[Result]) -> Iterator[Result]:
    """Yields stages; stops if all requests of a stage failed and none completed before."""
    completed = 0
    for stage in stages:
        yield stage
        completed += stage["completed"]
        if not completed:
            return


def _wait_ready(url: str, seconds: float) -> None:
    """Waits until a GET request to `url` succeeds.

    Raises:
        ValueError: no request succeeded within `seconds`.
    """
    deadline = time.monotonic() + seconds
    reported = ""
    while True:
        try:
            with urllib.request.urlopen(url, timeout=_READY_TIMEOUT_S):
                return
        except urllib.error.HTTPError as error:
            problem = f"HTTP {error.code}"
        except (OSError, http.client.HTTPException) as error:
            problem = str(getattr(error, "reason", error))
        if problem != reported:
            note(f"waiting for {url}: {problem}")
            reported = problem
        if time.monotonic() + _POLL_S > deadline:
            raise ValueError(
                f"{url} did not return 200 within --wait-ready-s {seconds:g}: {problem}"
            )
        time.sleep(_POLL_S)


def _stages(options: JobOptions, maker: StageMaker, play: Play) -> Iterator[Result]:
    if options.kind == "sweep":
        yield from _sweep(options, maker, play)
    elif options.kind == "goodput":
        yield from _search(options, maker, play)
    else:
        for stage in maker.fixed():
            yield play(stage)


def _sweep(options: JobOptions, maker: StageMaker, play: Play) -> Iterator[Result]:
    """Doubles the rate until the endpoint no longer keeps up, then tries a rate in between."""
    rate = options.rate
    for _ in range(options.max_stages):
        found = play(maker.at_rate(rate))
        yield found
        if found["failed"] or found["pace"] < _FOLLOWS:
            yield play(maker.at_rate(0.75 * rate))
            return
        rate *= 2.0


def _search(options: JobOptions, maker: StageMaker, play: Play) -> Iterator[Result]:
    """Searches for the highest rate within the SLO by doubling or halving, then bisection."""
    good, bad, rate = 0.0, 0.0, options.rate
    for _ in range(options.max_stages):
        found = play(maker.at_rate(rate))
        yield found
        if found["slo_kept"]:
            good = max(good, rate)
        else:
            bad = min(bad or rate, rate)
        if good and bad and bad <= _NARROW * good:
            return
        rate = 2.0 * good if not bad else 0.5 * (good + bad)


def _figures(stage: Stage, load: LoadResult, serve: ServeOptions, slo: Slo) -> Result:
    limits = {"ttft": slo.ttft_ms, "tpot": slo.tpot_ms}
    found = summarize(load, MetricOptions(goodput=limits), fixed_output=serve.ignore_eos)
    found["client_busy"] = next(
        check["value"] for check in found.pop("checks") if check["name"] == "client_busy"
    )
    found["pace"] = pace(load.records, [request.arrival_s for request in stage.requests])
    found["slo_kept"] = (
        not found["failed"]
        and found["p99_ttft_ms"] <= slo.ttft_ms
        and not found["p99_tpot_ms"] > slo.tpot_ms  # NaN for completions of one token
        # In a short stage, requests may be within the limits although the queue grows.
        and found["pace"] >= _KEEPS_UP
    )
    return {
        "label": stage.label,
        "rate": stage.rate,
        **found,
        **detailed(load.records),
        "timeline": timeline(load.records, load.start_s),
    }


def _summary(options: JobOptions, stages: list[Result]) -> Result:
    best = max(stages, key=lambda stage: float(stage["output_throughput"]))
    failed = sum(stage["failed"] for stage in stages)
    summary: Result = {
        "num_requests": sum(stage["completed"] for stage in stages) + failed,
        "failed_requests": failed,
        "best_output_throughput": best["output_throughput"],
        "best_request_throughput": max(stage["request_throughput"] for stage in stages),
    }
    busy = max(stage["client_busy"] for stage in stages)
    checks = [at_most("client_busy", busy, "cores per process", BUSY_CLIENT)]
    if failed:
        summary["errors"] = count_errors(stages)
    completed = summary["num_requests"] - failed
    # Sweep and goodput overload the endpoint on purpose: only a failure of all is an error.
    if options.kind not in ("sweep", "goodput") or not completed:
        checks.append(exactly("failed_requests", failed, "requests", 0))
        summary["failed"] = failed
    if options.kind == "goodput":
        rates = [stage["rate"] for stage in stages if stage["slo_kept"]]
        summary["goodput_rps"] = max(rates, default=0.0)
        checks.append(at_least("rates_within_slo", len(rates), "rates", 1))
    if options.kind == "shared-prefix":
        shared, *unshared = stages
        summary["hit_rate"] = shared["token_hit_rate"]
        for stage in unshared:
            summary["ttft_over_unshared"] = share(shared["mean_ttft_ms"], stage["mean_ttft_ms"])
    if options.kind == "soak":
        drift = _drift(stages[0]["ttfts"])
        summary["p99_ttft_last_over_first_third"] = drift
        checks.append(at_most("p99_ttft_last_over_first_third", drift, "x", _DRIFT))
    return {**summary, "checks": checks_json(checks)}


def _drift(ttfts: list[float]) -> float:
    """Ratio of the p99 TTFT of the last third of the requests to that of the first third."""
    third = max(len(ttfts) // 3, 1)
    first = percentile(ttfts[:third], 99.0)
    return share(percentile(ttfts[-third:], 99.0), first)


def _write(folder: Path, result: Result, stages: list[Result]) -> Result:
    data, page = folder / _DATA, folder / _PAGE
    try:
        data.write_text(json.dumps(json_ready({**result, "stages": stages}), allow_nan=False))
        page.write_text(write_page(result, stages))
    except OSError as error:
        raise ValueError(f"cannot write to --out {folder}: {error.strerror or error}") from error
    rows = [_row(stage) for stage in stages]
    return {**result, "result_file": str(data), "report_file": str(page), "rows": rows}


def _row(stage: Result) -> dict[str, Any]:
    names = (
        "label rate request_throughput output_throughput p50_ttft_ms p99_ttft_ms "
        "p99_tpot_ms token_hit_rate failed"
    )
    return {name: stage[name] for name in names.split()}


def _runner(options: JobOptions) -> tuple[Callable[[Load], LoadResult], Callable[[], None]]:
    """Two functions: one runs a load, the other releases the load generators."""
    if options.load_tasks:
        # Imported here, since a load from this process does not need Ray.
        from cluster.bench.jobs.spread import Generators

        generators = Generators(options.load_tasks)
        return generators.run, generators.close

    def run(load: Load) -> LoadResult:
        longest = max(request.output_len for request in load.requests)
        seconds = max(load.requests[-1].arrival_s, 1.0)
        rate = len(load.requests) / seconds
        count = choose_processes(len(load.requests), longest, load.max_concurrency, rate)
        return run_load(load, count)

    return run, lambda: None
