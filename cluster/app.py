"""The Serve application: gateways in front, one WorkerGroup deployment per model behind them.

`rayfleet serve` runs it; `serve deploy` finds it as `import_path: cluster.app:build_app`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from cluster.autoscaling.options import gateway_replicas, worker_replicas
from cluster.autoscaling.registry import flattened
from cluster.checkpoints import with_commits
from cluster.config import ModelSpec, ServeConfig, serve_config_from_mapping
from cluster.connections import release_reset_connections
from cluster.environment import LONGEST_STREAM_S
from cluster.settings import RaySettings
from cluster.starting import delayed, tell
from cluster.targets import follow_targets
from cluster.transport import RayTransport
from router.config import GatewayConfig
from worker.config import EngineConfig
from worker.group import CPUS_PER_RANK, WorkerGroup, metrics_directory
from worker.memory import freeze_gc, keep_freed_memory, trim_regularly
from worker.metrics.node import NodeMetrics, NodeMetricsConfig
from worker.wire.log import log_as
from worker.wire.tracing import create_tracing

if TYPE_CHECKING:
    from starlette.applications import Starlette

UNLIMITED = 10**6
"""Serve counts an attach stream as one request for ever; admission is the gateway's."""
STRATEGIES: Final = {"node": "STRICT_PACK", "pack": "PACK", "spread": "SPREAD"}
"""Ray's names of where the ranks of a group may be."""
KNOW_WORKERS_S = 2.0
"""A new gateway waits this long for workers that are there; where they are loading, in vain."""
KEPT_BYTES = 4 * 2**20
"""Freed memory that each thread of a gateway keeps: bodies are larger, and rare."""
QUIET = {"enable_access_log": False}


class GatewayReplica:
    """One gateway process."""

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
        release_reset_connections()
        keep_freed_memory(KEPT_BYTES)
        node_id = ray.get_runtime_context().get_node_id()
        self._gateway = Gateway(
            config,
            {
                name: RayTransport(handle, handle.deployment_name, node_id)
                for name, handle in handles.items()
            },
            create_tracing("gateway", traces_endpoint),
            {name: RaySettings(serve.get_replica_context().app_name, name) for name in handles},
        )
        self._gateway.report = partial(tell, "gateway")
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
        # Requests come as soon as this returns: one that replaces another knows its workers then.
        await self._gateway.wait_ready(KNOW_WORKERS_S)
        freeze_gc()
        trim_regularly()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve where a model's workers follow the load: what there is for them to do."""
        told: dict[str, float] = {}
        for model in self._gateway.models:
            told |= flattened(self._deployments[model.route.name], model.load.read())
        return told

    def __serve_build_asgi_app__(self) -> Starlette:
        """The HTTP application, built inside the replica: nothing of it is ever pickled."""
        from router.api.app import create_app

        app = create_app(self._gateway)
        freeze_gc()
        return app

    async def _follow_targets(self) -> None:
        listeners = {
            self._deployments[model.route.name]: model.set_target for model in self._gateway.models
        }
        await follow_targets(serve.get_replica_context().app_name, listeners)

    async def __del__(self) -> None:
        """Called by Serve before the replica ends."""
        self._following.cancel()
        self._metrics.close()
        await self._gateway.close()


def build_app(args: Mapping[str, Any]) -> serve.Application:
    """Builder for Serve configs; `args` holds the keys of a rayfleet config file.

    A config names its device: nodes with GPUs may join after it has been applied. A start that may
    heal is tried again for ever: nobody applies the same config twice.
    """
    config = serve_config_from_mapping({"startup_retry_s": math.inf, **args})
    return build_application(config, nodes_may_join=True)


def build_application(
    config: ServeConfig,
    group_class: type[WorkerGroup] = WorkerGroup,
    *,
    nodes_may_join: bool = False,
) -> serve.Application:
    """The application for `config`, on the Ray cluster that this process is connected to."""
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
            reporting=any(model.autoscaling.enabled for model in config.models),
        ),
        max_ongoing_requests=UNLIMITED,
        # In a rolling update the new ones come first: they need no GPU, and one must be there.
        max_surge_percent=100,
        ray_actor_options={"num_cpus": 0.1},
        health_check_period_s=2,
        graceful_shutdown_timeout_s=LONGEST_STREAM_S,
        graceful_shutdown_wait_loop_s=0.2,
        logging_config=QUIET,
    )
    return gateway.bind(
        config.gateway(), handles, config.node_metrics(), config.endpoint.otlp_traces_endpoint
    )


def resolve_device(engine: EngineConfig, *, nodes_may_join: bool = False) -> EngineConfig:
    """`engine` with its device decided: CUDA where the Ray cluster has GPUs.

    Raises:
        ValueError: CUDA is asked for, no node has a GPU, and none that may join is waited for.
    """
    if engine.device == "cpu" or (engine.device == "cuda" and nodes_may_join):
        return engine
    num_gpus = ray.cluster_resources().get("GPU", 0)
    if engine.device == "cuda" and not num_gpus:
        raise ValueError("--device cuda was asked for, but no node of the Ray cluster has a GPU")
    return replace(engine, device="cuda" if num_gpus else "cpu")


def _surge_percent(engine: EngineConfig, num_workers: int) -> int:
    """How many workers beyond their number a rolling update may start: one where there is room.

    On CPU there is. GPUs are rarely spare, and an update that waits for some would never end.
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
        # What may heal is waited for in the constructor. Where it is, Serve's own number stays for
        # replicas that die in it: one that is lost with its node must not end the deployment.
        **({} if config.endpoint.startup_retry_s else {"max_constructor_retry_count": 1}),
        ray_actor_options={"num_cpus": 0},
        # Each group has its own; Ray puts the next one where most is free.
        placement_group_bundles=[bundle] * engine.tensor_parallel_size,
        placement_group_strategy=STRATEGIES[model.fleet.tensor_parallel_placement],
        request_router_config=RequestRouterConfig(
            request_router_class="cluster.pinning.PinnedRouter"
        ),
        health_check_period_s=2,
        # Gateways close their attach streams once a worker that left the set has finished all.
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
        report=partial(tell, model.name),
    )
