"""`make check-gateway`: CPU time per token from a worker's engine to the client.

The real proxy, gateway and worker frontend run on a local Ray cluster. Only the engine is paced: it
has the real scheduler, but its steps only wait. One baseline sends tokens from worker to gateway as
Serve items instead of over a socket. The other one is a plain two-hop Serve app with Ray's default
settings.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

from cluster.bench.command import run_measurement
from cluster.bench.datasets import DatasetOptions
from cluster.bench.report import Result, at_most, checks_json, exactly, note
from cluster.bench.serve import ServeOptions, run_serve
from cluster.bench.sse import EventScanner, has_text, has_usage
from cluster.bench.turns import take_turns
from cluster.config import find_demo_model
from deploy.benchmarks.routing.paced import prose_after
from tests.campaigns.checks import check_main
from tests.campaigns.gateway.options import GatewayOptions, Target, Variant
from tests.support.fleet.processes import CpuMeter

GOAL_CPU_MS_PER_TOKEN = 0.19
_SYSTEM = "ray_system"
_SYSTEM_PROCESSES = ("gcs_server", "raylet", "ray::ServeController")
"""Processes that do not handle tokens. Their time is reported separately and does not count toward
the goal."""
_IDLE_S = 3.0
"""Seconds over which idle CPU time is measured. It would otherwise inflate the time per token at
low load."""


def run_gateway(options: GatewayOptions) -> Result:
    """Measures one variant, or two variants in turn."""
    options = replace(options, model=options.model or find_demo_model())
    baseline = options.baseline
    if baseline is None and options.rounds == 1:
        return measure(options)
    variants = (options.variant,) if baseline is None else (options.variant, baseline)
    turns = take_turns(
        {name: partial(_in_process, options, name) for name in variants}, options.rounds
    )
    middle = sorted(turns[options.variant], key=_cost)
    result = dict(middle[(len(middle) - 1) // 2])
    result["cpu_ms_per_token_rounds"] = {name: turns.values(name, _cost) for name in variants}
    result["by_streams_rounds"] = {
        name: [run["by_streams"] for run in turns[name]] for name in variants
    }
    if baseline is not None:
        result["baseline_cpu_ms_per_token"] = turns.median(baseline, _cost)
        result[f"baseline_over_{options.variant}"] = turns.comparison(
            baseline, options.variant, _cost
        )
    return result


def _cost(run: Result) -> float:
    return float(run["cpu_ms_per_token"])


def measure(options: GatewayOptions) -> Result:
    """Starts a variant in this process, sends load and reports CPU time per token by part.

    Raises:
        RuntimeError: this process already uses Ray Serve, or a process exited during the
            measurement.
    """
    cells: dict[str, Result] = {}
    with _starter(options)(options) as target:
        wrong_text = target.says_prose and not _prints(target, options)
        for streams in options.streams:
            load = _load(options, target, streams)
            run_serve(replace(load, num_prompts=streams, seed=load.seed + 1))
            meter = CpuMeter({**target.parts, _SYSTEM: _SYSTEM_PROCESSES})
            served = run_serve(load)
            cells[str(streams)] = cell_of(served, meter.seconds())
        meter = CpuMeter(target.parts)
        time.sleep(_IDLE_S)
        idle = {name: spent * 1000.0 / _IDLE_S for name, spent in meter.seconds().items()}
    return _result(options, cells, idle, meter, wrong_text)


def _starter(
    options: GatewayOptions,
) -> Callable[[GatewayOptions], AbstractContextManager[Target]]:
    # Imported here: both import Ray, whose environment must be prepared first.
    from tests.campaigns.gateway import variants

    return variants.two_hop if options.variant == "two-hop" else variants.rayfleet


def _load(options: GatewayOptions, target: Target, streams: int) -> ServeOptions:
    return ServeOptions(
        base_url=target.base_url,
        endpoint=target.endpoint,
        tokenizer=options.model,
        prompt_format="text",
        dataset=DatasetOptions(
            random_input_len=options.input_len, random_output_len=options.output_len
        ),
        num_prompts=streams * options.requests_per_stream,
        max_concurrency=streams,
        num_processes=1,
        ignore_eos=True,
    )


def _prints(target: Target, options: GatewayOptions) -> bool:
    """Whether a streaming completion equals the engine's output, without lost or repeated
    tokens."""
    body = {
        "messages": [{"role": "user", "content": "Tell me."}],
        "max_tokens": options.output_len,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        target.base_url + target.endpoint,
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        events = EventScanner().feed(response.read())
    deltas = [json.loads(data)["choices"][0]["delta"] for data in events if has_text(data)]
    [usage] = [json.loads(data)["usage"] for data in events if has_usage(data)]
    meant = prose_after(options.model, usage["prompt_tokens"], options.output_len)
    return "".join(delta["content"] for delta in deltas) == meant


def cell_of(served: Result, seconds: dict[str, float]) -> Result:
    """Metrics of a load, and the CPU time per token of each part, given the parts' total
    `seconds`."""
    num_tokens = served["total_output_tokens"]
    if not num_tokens:
        raise ValueError(f"no tokens were received: {served.get('errors')}")
    parts = {name: spent * 1000.0 / num_tokens for name, spent in seconds.items()}
    system = parts.pop(_SYSTEM)
    names = ("completed", "failed", "duration", "output_throughput", "total_output_tokens")
    latencies = ("median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms")
    return {
        "cpu_ms_per_token": sum(parts.values()),
        "cpu_ms_per_token_parts": parts,
        "ray_system_cpu_ms_per_token": system,
        **{name: served[name] for name in (*names, *latencies)},
    }


def _result(
    options: GatewayOptions,
    cells: dict[str, Result],
    idle: dict[str, float],
    meter: CpuMeter,
    wrong_text: bool,
) -> Result:
    per_stream = options.requests_per_stream * options.output_len
    num_tokens = sum(cell["total_output_tokens"] for cell in cells.values())
    failed = sum(cell["failed"] for cell in cells.values())
    last = cells[str(options.streams[-1])]
    checks = [
        exactly("tokens", num_tokens, "tokens", sum(options.streams) * per_stream),
        exactly("failed_requests", failed, "requests", 0),
        exactly("wrong_text", int(wrong_text), "completions", 0),
    ]
    if options.variant == "rayfleet":
        total = last["cpu_ms_per_token"]
        checks.insert(0, at_most("cpu_ms_per_token", total, "ms", GOAL_CPU_MS_PER_TOKEN))
    return {
        "arm": options.variant,
        "streams": options.streams[-1],
        "step_ms": options.step_ms,
        **last,
        "idle_cpu_ms_per_s_parts": idle,
        "processes": meter.num_processes(),
        "by_streams": {
            streams: {
                name: cell[name]
                for name in ("cpu_ms_per_token", "cpu_ms_per_token_parts", "median_ttft_ms")
            }
            for streams, cell in cells.items()
        },
        "checks": checks_json(checks),
    }


def _in_process(options: GatewayOptions, variant: Variant, number: int) -> Result:
    command = [sys.executable, "-m", "tests.campaigns.gateway.main", "--json", "--variant", variant]
    command += ["--streams", ",".join(map(str, options.streams))]
    for name in ("step_ms", "input_len", "output_len", "requests_per_stream", "model"):
        command += ["--" + name.replace("_", "-"), str(getattr(options, name))]
    result = run_measurement(command, f"the measurement of {variant}")
    cells = [f"{cell['cpu_ms_per_token']:.3f}" for cell in result["by_streams"].values()]
    note(f"{variant}, round {number}: {', '.join(cells)} ms CPU per token")
    return result


if __name__ == "__main__":
    sys.exit(check_main(run_gateway, GatewayOptions))
