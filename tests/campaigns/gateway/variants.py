"""Variants that `make check-gateway` measures, each on a local Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from cluster.bench.report import note
from cluster.bench.serve import CHAT, COMPLETIONS
from cluster.config import EndpointConfig, FleetConfig, ModelSpec, ServeConfig
from cluster.launch import APPLICATION, LocalFleet
from cluster.local_ray import local_ray
from cluster.ports import free_ports
from deploy.benchmarks.routing.paced import run_steady
from tests.campaigns.gateway.options import GatewayOptions, Target
from worker.config import EngineConfig

_HOST = "127.0.0.1"
_PROXY = ("ray::ProxyActor", "ray::HAProxyManager", "haproxy")


@contextmanager
def rayfleet(options: GatewayOptions) -> Iterator[Target]:
    """The real gateway and worker frontend behind the proxy, with a steady worker as engine."""
    config = ServeConfig(
        endpoint=EndpointConfig(host=_HOST, port=free_ports(1)[0]),
        models=(
            ModelSpec(
                fleet=FleetConfig(),
                engine=EngineConfig.of(
                    model=options.model, device="cpu", max_num_seqs=max(256, *options.streams)
                ),
            ),
        ),
    )

    def build(config: ServeConfig) -> Any:
        from deploy.benchmarks.routing.paced_group import build_paced

        sockets = options.variant == "rayfleet"
        return build_paced(config, partial(run_steady, options.step_ms / 1000.0), sockets=sockets)

    replica = f"ray::ServeReplica:{APPLICATION}:"
    parts = {
        "proxy": _PROXY,
        "gateway": (f"{replica}gateway",),
        "worker_front": (replica + config.models[0].deployment,),
    }
    with LocalFleet(config, report=note, build=build) as fleet:
        yield Target(
            base_url=fleet.base_url,
            endpoint=CHAT,
            parts=parts,
            says_prose=True,
        )


@contextmanager
def two_hop(options: GatewayOptions) -> Iterator[Target]:
    """The plain Serve app, with Serve's defaults."""
    (port,) = free_ports(1)
    with local_ray():
        from ray import serve

        from tests.campaigns.gateway.two_hop import build

        serve.start(http_options={"host": _HOST, "port": port})
        try:
            serve.run(build(options.step_ms / 1000.0), name="two-hop")
            replica = "ray::ServeReplica:two-hop:"
            parts = {
                "proxy": _PROXY,
                "gateway": (f"{replica}Ingress",),
                "worker_front": (f"{replica}Generator",),
            }
            yield Target(base_url=f"http://{_HOST}:{port}", endpoint=COMPLETIONS, parts=parts)
        finally:
            serve.shutdown()
