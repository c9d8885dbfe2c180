"""Routers and their paced workers, as local processes."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import msgspec

from cluster.bench.report import note
from cluster.config import EndpointConfig, FleetConfig, ModelSpec, ServeConfig
from cluster.launch import LocalFleet
from cluster.local_ray import local_ray
from cluster.ports import free_ports
from deploy.benchmarks.routing.paced import run_paced
from deploy.benchmarks.routing.real.http_worker import HttpWorker
from deploy.benchmarks.routing.real.options import OWN, RealOptions
from deploy.benchmarks.routing.workload import FleetShape
from router.config import RoutingConfig
from worker.config import EngineConfig

MODEL_NAME = "paced"
"""Model name that paced workers serve."""
_HOST = "127.0.0.1"
_START_S = 180.0
_STOP_S = 10.0


def start(options: RealOptions) -> AbstractContextManager[str]:
    """Context manager that runs the router `options.variant` and its workers; yields the endpoint's
    base URL."""
    if options.variant == OWN:
        return own_fleet(options.model, options.shape, options.pace, RoutingConfig())
    if options.variant == "sglang-router":
        return _sglang_router(options)
    return _ray_serve(options, by_prefix=options.variant == "ray-prefix")


def missing(options: RealOptions, peer: str) -> str:
    """Why a peer cannot be measured on this machine, and how to fix that; empty if it can."""
    if peer == "sglang-router" and shutil.which(options.sglang_router) is None:
        return (
            "skipping sglang-router: install it into its own environment (python -m venv V; "
            "V/bin/pip install sglang-router==0.3.2) and give --sglang-router V/bin/sglang-router"
        )
    return ""


@contextmanager
def own_fleet(model: str, shape: FleetShape, pace: float, routing: RoutingConfig) -> Iterator[str]:
    """Context manager that runs rayfleet with paced workers; yields the endpoint's base URL.

    Args:
        model: folder with a tokenizer.
        shape: number, limits and speeds of the workers.
        pace: factor for the step times.
        routing: routing options of the gateway.
    """
    engine = EngineConfig.of(model=model, device="cpu", max_num_seqs=shape.max_num_seqs)
    fleet_config = FleetConfig(num_workers=len(shape.slowness), served_model_name=MODEL_NAME)
    config = ServeConfig(
        endpoint=EndpointConfig(host=_HOST, port=free_ports(1)[0], log_level="warning"),
        models=(ModelSpec(fleet=fleet_config, engine=engine, routing=routing),),
    )

    def build(config: ServeConfig) -> Any:
        # Imported here: Ray reads its environment when it is imported.
        from deploy.benchmarks.routing.paced_group import build_paced

        return build_paced(config, partial(run_paced, shape, pace))

    with LocalFleet(config, report=note, build=build) as fleet:
        yield fleet.base_url


@contextmanager
def _ray_serve(options: RealOptions, *, by_prefix: bool) -> Iterator[str]:
    """Ray Serve with default settings, on a local cluster with rayfleet's Ray settings."""
    (port,) = free_ports(1)
    with local_ray():
        from ray import serve

        from deploy.benchmarks.routing.real.serve_app import build

        serve.start(http_options={"host": _HOST, "port": port})
        try:
            serve.run(build(options.model, options, by_prefix=by_prefix), name="paced")
            yield f"http://{_HOST}:{port}"
        finally:
            serve.shutdown()


@contextmanager
def _sglang_router(options: RealOptions) -> Iterator[str]:
    """sglang-router with policy cache_aware and default settings, and one process per worker."""
    port, metrics_port, *worker_ports = free_ports(2 + options.num_workers)
    processes: list[subprocess.Popen[bytes]] = []
    urls = [f"http://{_HOST}:{worker}" for worker in worker_ports]
    base_url = f"http://{_HOST}:{port}"
    try:
        for worker in worker_ports:
            settings = HttpWorker(worker, options.model, options.num_workers, options.pace)
            module = "deploy.benchmarks.routing.real.http_worker"
            text = msgspec.json.encode(settings).decode()
            processes.append(subprocess.Popen([sys.executable, "-m", module, text]))
        for url in urls:
            _wait(f"{url}/health", processes)
        command = [options.sglang_router, "launch", "--worker-urls", *urls]
        command += ["--policy", "cache_aware", "--host", _HOST, "--port", str(port)]
        command += ["--prometheus-port", str(metrics_port), "--prometheus-host", _HOST]
        command += ["--log-level", "warn"]
        processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        _wait(f"{base_url}/readiness", processes)
        yield base_url
    finally:
        _end(processes)


def _wait(url: str, processes: Sequence[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if any(process.poll() is not None for process in processes):
            raise ValueError(f"a process exited before {url} was ready; see its error above")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise ValueError(f"{url} did not respond within {_START_S:g} s")


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
