"""The Serve application: one deployment of gateways and, per model, one of WorkerGroups.

`rayfleet serve` runs it; Serve configs refer to it as `import_path: cluster.app:build_app`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from cluster.autoscaling.gateways import CPU, CpuMeter
from cluster.autoscaling.options import gateway_replicas, worker_replicas
from cluster.autoscaling.registry import flattened
from cluster.checkpoints import with_commits
from cluster.config import ModelSpec, ServeConfig, serve_config_from_mapping
from cluster.connections import release_reset_connections
from cluster.environment import LONGEST_STREAM_S
from cluster.peers import RayPeers
from cluster.settings import RaySettings
from cluster.starting import delayed, publish
from cluster.targets import follow_targets
from cluster.tls import NODES_SERVE_TLS
from cluster.transport import RayTransport
from router.config import GatewayConfig
from router.peers import ID_PREFIX, Peers
from worker.config import EngineConfig
from worker.group import CPUS_PER_RANK, WorkerGroup, metrics_directory
from worker.memory import freeze_gc, keep_freed_memory, trim_regularly
from worker.metrics.node import NodeMetrics, NodeMetricsConfig
from worker.protocol.log import log_as
from worker.protocol.tracing import create_tracing

if TYPE_CHECKING:
    from starlette.applications import Starlette

UNLIMITED = 10**6
"""Value of Serve's max_ongoing_requests that never limits a replica: each attach stream counts as
one ongoing request until it ends, and admission control is done by gateways."""
STRATEGIES: Final = {"node": "STRICT_PACK", "pack": "PACK", "spread": "SPREAD"}
"""Ray's placement group strategy for each value of --tensor-parallel-placement."""
KNOW_WORKERS_S = 2.0
"""Maximum time in seconds that a new gateway waits for a worker before it accepts requests: long
enough to attach to running workers, but short in case all are still loading."""
KEPT_BYTES = 4 * 2**20
"""Bytes of freed memory that malloc may keep per thread of a gateway; more, after a larger request
body, is returned to the system."""
QUIET = {"enable_access_log": False}


class GatewayReplica:
    """Serve deployment of the gateways; each replica is one gateway process."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        config: GatewayConfig,
        handles: dict[str, DeploymentHandle[Any]],
        metrics: NodeMetricsConfig,
        traces_endpoint: str = "",
    ) -> None:
        """Loads tokenizers and attaches to the workers."""
        from router.gateway import Gateway

        log_as("gateway")
        self._cpu = CpuMeter()
        release_reset_connections()
        keep_freed_memory(KEPT_BYTES)
        node_id = ray.get_runtime_context().get_node_id()
        replica = serve.get_replica_context()
        own_id = f"{ID_PREFIX}{replica.replica_id.unique_id}"
        self._peers = Peers(own_id, RayPeers(replica.deployment, replica.app_name))
        self._gateway = Gateway(
            config,
            {
                name: RayTransport(handle, handle.deployment_name, node_id)
                for name, handle in handles.items()
            },
            create_tracing("gateway", traces_endpoint),
            {name: RaySettings(replica.app_name, name) for name in handles},
            self._peers,
            {name: RaySettings(replica.app_name, name, "lora") for name in handles},
        )
        self._gateway.report = partial(publish, "gateway")
        self._gateway.delayed = delayed
        self._metrics = NodeMetrics(
            f"gateway {self._gateway.gateway_id}",
            self._gateway.metrics,
            metrics_directory(),
            metrics,
        )
        self._gateway.gather = self._metrics.gather
        await self._metrics.open()
        self._deployments = {name: handle.deployment_name for name, handle in handles.items()}
        await self._gateway.start()
        self._following = asyncio.create_task(self._follow_targets())
        # Requests arrive as soon as this returns: a gateway that replaces another needs workers.
        await self._gateway.wait_ready(KNOW_WORKERS_S)
        freeze_gc()
        trim_regularly()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """CPU usage of this gateway and load of each model, flattened for Serve. Serve calls this
        if autoscaling is enabled for gateways or for any model."""
        loads = {CPU: self._cpu.read()}
        for model in self._gateway.models:
            loads |= flattened(self._deployments[model.route.name], model.load.read())
        return loads

    async def answer_peer(self, request: bytes, peer_id: str) -> bytes:
        """Handles a call from another gateway, which PinnedRouter routes by `peer_id`. An empty
        request only sets up the caller's router."""
        return await self._peers.answer_call(request) if request else b""

    async def stream_to_peer(self, request: bytes, peer_id: str) -> AsyncIterator[bytes]:
        """Handles a streaming call from another gateway; see `answer_peer`."""
        async for item in self._peers.answer_stream(request):
            yield item

    def __serve_build_asgi_app__(self) -> Starlette:
        """The HTTP application; Serve calls this in the replica, so that nothing is pickled."""
        from router.api.app import create_app

        app = create_app(self._gateway)
        self._peers.start()
        freeze_gc()
        return app

    async def _follow_targets(self) -> None:
        listeners = {
            self._deployments[model.route.name]: model.set_target for model in self._gateway.models
        }
        await follow_targets(serve.get_replica_context().app_name, listeners)

    async def __del__(self) -> None:
        """Closes the gateway; Serve calls this before the replica exits."""
        self._following.cancel()
        self._metrics.close()
        await self._gateway.close()


def build_app(args: Mapping[str, Any]) -> serve.Application:
    """The application for a Serve config; `args` holds the keys of a rayfleet config file.

    `device: cuda` is accepted without a GPU, as nodes with GPUs may join later. A failed start that
    may succeed later is retried without limit by default, since the config is applied only once.
    Serve's `http_options` set the address, so any `Host` is allowed unless `allowed_hosts` is set.

    Raises:
        ValueError: a key is unknown, or a value has the wrong type.
    """
    config = serve_config_from_mapping({"startup_retry_s": math.inf, "host": "0.0.0.0", **args})
    if config.endpoint.ssl_certfile:
        raise ValueError(NODES_SERVE_TLS)
    return build_application(config, nodes_may_join=True)


def build_application(
    config: ServeConfig,
    group_class: type[WorkerGroup] = WorkerGroup,
    *,
    nodes_may_join: bool = False,
) -> serve.Application:
    """The application for `config`, on the Ray cluster that this process is connected to.

    Args:
        config: models and endpoint to serve.
        group_class: class of the models' replicas; benchmarks and tests use others.
        nodes_may_join: whether nodes with GPUs may join later (see `resolve_device`).

    Raises:
        ValueError: the device is CUDA, no node has a GPU, and none may join.
    """
    models = tuple(replace(model, engine=with_commits(model.engine)) for model in config.models)
    config = replace(config, models=models)
    handles = {
        model.name: _bind_worker_group(config, model, group_class, nodes_may_join)
        for model in config.models
    }
    gateway = serve.deployment(
        serve.ingress()(GatewayReplica),
        name="gateway",
        **gateway_replicas(
            config.endpoint.num_gateways,
            config.endpoint.gateway_limit,
            reporting=any(model.autoscaling.enabled for model in config.models),
        ),
        max_ongoing_requests=UNLIMITED,
        # A rolling update starts all new gateways before it stops old ones: they need no GPU, and
        # one must always be available.
        max_surge_percent=100,
        ray_actor_options={"num_cpus": 0.1},
        health_check_period_s=2,
        # A gateway that hangs is killed after three checks in a row without an answer, 15 to 17 s;
        # one that is stopped by a signal, within 3 s (`cluster.stopped_replicas`). With Serve's
        # default of 30 s per check its clients would wait for 96 s. A check runs on the event loop,
        # which no request may keep for more than 0.05 s.
        health_check_timeout_s=5,
        graceful_shutdown_timeout_s=LONGEST_STREAM_S,
        graceful_shutdown_wait_loop_s=0.2,
        logging_config=QUIET,
    )
    return gateway.bind(
        config.gateway(), handles, config.node_metrics(), config.endpoint.otlp_traces_endpoint
    )


def resolve_device(engine: EngineConfig, *, nodes_may_join: bool = False) -> EngineConfig:
    """`engine` with its device resolved: cuda if the Ray cluster has GPUs, unless it is set to cpu.

    Raises:
        ValueError: the device is CUDA, no node has a GPU, and none may join.
    """
    if engine.device == "cpu" or (engine.device == "cuda" and nodes_may_join):
        return engine
    num_gpus = ray.cluster_resources().get("GPU", 0)
    if engine.device == "cuda" and not num_gpus:
        raise ValueError(
            "--device cuda requires a GPU, but no node of the Ray cluster has one: add a node with "
            "a GPU, or use --device cpu"
        )
    return replace(engine, device="cuda" if num_gpus else "cpu")


def _surge_percent(engine: EngineConfig, num_workers: int) -> int:
    """Extra workers that a rolling update starts, in percent: one worker on CPU, none on GPUs.

    Spare GPUs are rare, and an update that waits for them might never finish.
    """
    return 0 if engine.device == "cuda" else max(100 // num_workers, 1)


def _bind_worker_group(
    config: ServeConfig, model: ModelSpec, group_class: type[WorkerGroup], nodes_may_join: bool
) -> serve.Application:
    engine = resolve_device(model.engine, nodes_may_join=nodes_may_join)
    bundle = {"GPU": 1.0} if engine.device == "cuda" else {"CPU": CPUS_PER_RANK}
    deployment = serve.deployment(
        group_class,
        name=model.deployment,
        **worker_replicas(model.fleet.num_workers, model.autoscaling),
        max_ongoing_requests=UNLIMITED,
        max_surge_percent=_surge_percent(engine, model.max_workers),
        # With startup_retry_s the constructor itself retries transient failures. Serve's default
        # number of retries then applies to replicas that die in it: one that is lost with its node
        # must not fail the deployment.
        **({} if config.endpoint.startup_retry_s else {"max_constructor_retry_count": 1}),
        ray_actor_options={"num_cpus": 0},
        # One placement group per worker group, with one bundle per rank.
        placement_group_bundles=[bundle] * engine.tensor_parallel_size,
        placement_group_strategy=STRATEGIES[model.fleet.tensor_parallel_placement],
        request_router_config=RequestRouterConfig(
            request_router_class="cluster.pinning.PinnedRouter"
        ),
        health_check_period_s=2,
        # Likewise. Three checks take half a minute: gateways give up a worker after as long, even
        # if its event loop is only busy.
        health_check_timeout_s=10,
        # Gateways close the attach stream of a draining worker once all its requests are finished.
        graceful_shutdown_timeout_s=LONGEST_STREAM_S,
        graceful_shutdown_wait_loop_s=0.2,
        logging_config=QUIET,
    )
    return deployment.bind(
        engine,
        model.name,
        config.node_metrics(),
        traces_endpoint=config.endpoint.otlp_traces_endpoint,
        startup_retry_s=config.endpoint.startup_retry_s,
        report=partial(publish, model.name),
    )
