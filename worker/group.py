"""Worker group on Ray: the replica with the frontend, and the rank actors.

This is the only module in `worker/` that uses Ray. `cluster/app.py` wraps `WorkerGroup` as a Serve
deployment whose placement group has one bundle per rank; the replica itself runs in the first
bundle.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec
import ray
from ray import serve
from ray.exceptions import RayActorError, RayTaskError
from ray.experimental import internal_kv
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from worker.config import EngineConfig
from worker.core.adapter_folder import static_adapters
from worker.frontend.attach import AttachServer
from worker.frontend.event_loop_monitor import EventLoopMonitor
from worker.frontend.server import WorkerFrontend
from worker.frontend.traces import WorkerTraces
from worker.memory import freeze_gc, trim_regularly
from worker.metrics.collector import WorkerView, worker_metrics
from worker.metrics.node import NodeMetrics, NodeMetricsConfig
from worker.metrics.rank import RankOwner, belong_to
from worker.models.config.eagle_config import read_eagle
from worker.models.config.model_config import load_model_config
from worker.plan.rendezvous import Rendezvous, published
from worker.protocol.exposition import render
from worker.protocol.frames import SocketOffer, heartbeat_key
from worker.protocol.log import log_as
from worker.protocol.retry import RemoteFailure, StartReport, may_heal, until_started
from worker.protocol.tracing import create_tracing

logger = logging.getLogger(__name__)

CPUS_PER_RANK = 0.1
"""Fraction of a core that is reserved in Ray per rank on CPU. The number of compute threads is set
in EngineConfig."""
MAX_FAILED_REBUILDS = 3
"""Consecutive failed rebuilds after which the replica reports itself unhealthy, so that Serve
replaces it."""
_RENDEZVOUS_POLL_S = 0.02
LAST_WORDS_S = 1.0
"""Maximum time in seconds to wait for the other ranks' errors after a rank has exited."""


class RankActor:
    """One rank of a group, in a separate process, so that a crash does not affect streams."""

    def node(self) -> tuple[str, str]:
        """Id and address of the node on which this process runs."""
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()

    def belong_to(self, model_name: str, worker_id: str) -> None:
        """Labels the metrics of this rank with the model and worker that it belongs to."""
        belong_to(RankOwner(model_name, worker_id, metrics_directory()))

    def lead(self, config: EngineConfig, directory: str, host: str = "") -> None:
        """Runs rank 0; blocks until it exits.

        On CPU, this process only runs the scheduler; a child process runs the steps. `host` is this
        node's address if other ranks are on other nodes, otherwise empty.

        Raises:
            Exception: the error that ended the rank.
        """
        log_as("rank 0")
        # Imported here because the driver and the replica also import this module but need no
        # engine.
        from worker.core.loop import serve_engine

        serve_engine(config, directory, host)

    def follow(
        self, rank: int, config: EngineConfig, directory: str, rendezvous: Rendezvous | None = None
    ) -> None:
        """Runs a rank other than 0; blocks until it exits. Raises the same exceptions as `lead`."""
        log_as(f"rank {rank}")
        from worker.rank.main import run_rank

        run_rank(rank, config, directory, rendezvous)


class WorkerGroup:
    """Serves one copy of a model for as long as its replica exists. Failed rank groups
    are rebuilt."""

    async def __init__(  # type: ignore[misc]  # awaited by Serve
        self,
        config: EngineConfig,
        model_name: str = "",
        metrics: NodeMetricsConfig | None = None,
        *,
        traces_endpoint: str = "",
        startup_retry_s: float = 0.0,
        report: StartReport = lambda delay: None,
    ) -> None:
        """Loads the model on all ranks. A failed startup is retried if a retry may succeed.

        Args:
            config: the engine configuration of each rank.
            model_name: model name for clients; if empty, `config.model`.
            metrics: where to serve this node's metrics.
            traces_endpoint: URL to export spans to; if empty, OpenTelemetry's environment variables
                are used.
            startup_retry_s: time in seconds within which retries may begin; inf for no limit.
            report: called with each delay of the startup, then with None (see `StartReport`).

        Raises:
            RemoteFailure: a rank failed; the last line of the message is the root cause.
            ValueError: the checkpoint is unsupported or unavailable.
        """
        self.config = config
        worker_id = serve.get_replica_context().replica_id.unique_id
        log_as(f"worker {worker_id}")
        directory = os.environ.get("RAYFLEET_RUNTIME_DIRECTORY", "/tmp")
        tracing = create_tracing(f"worker {worker_id}", traces_endpoint)
        traces = None if tracing is None else WorkerTraces(tracing, worker_id)
        self._loop_monitor = EventLoopMonitor(partial(_publish, worker_id))
        self.frontend = WorkerFrontend(
            worker_id, directory, traces, config.step_timeout_s, self._loop_monitor
        )
        self._model_name = model_name or config.model
        self._vllm_names = metrics is not None and metrics.vllm_names
        self._metrics = NodeMetrics(
            f"worker {worker_id}", self._render, metrics_directory(), metrics
        )
        await self._metrics.open()
        self._server = AttachServer(self.frontend, directory)
        self._actors: list[Any] = []
        self._broken: str | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._starting = asyncio.ensure_future(
            until_started(self._build, retry_s=startup_retry_s, report=report)
        )
        ranks = await self._starting
        self._loop_monitor.start()
        await self._server.open()
        self._supervisor = asyncio.create_task(self._supervise(ranks))
        freeze_gc()
        trim_regularly()

    async def attach(
        self, gateway_id: str, worker_id: str, node_id: str = ""
    ) -> AsyncIterator[bytes]:
        """Yields a SocketOffer, then the gateway's stream of WorkerItems, both encoded as msgpack.

        For a gateway on this node (`node_id`), only the SocketOffer is yielded, since the socket
        carries the items. `worker_id` is unused here, since the handle has already used it to
        select this replica.
        """
        path = self._socket_for(node_id)
        yield msgspec.msgpack.encode(SocketOffer(path))
        if path is not None:
            # HAZARD: Serve stops a draining replica once it has no open calls, so this call stays
            # open for as long as the gateway needs the socket.
            await self._server.wait_closed()
            return
        async with aclosing(self.frontend.attach(gateway_id)) as items:  # type: ignore[type-var]
            async for item in items:
                yield item

    async def submit(self, payload: bytes, worker_id: str) -> bytes:
        """Handles a SubmitBatch; returns the SubmitReply. `worker_id` is unused, as in `attach`."""
        return await self.frontend.submit(payload)

    async def hello(self) -> bytes:
        """No-op that each handle calls in advance, since a handle's first call also starts its
        request router."""
        return b""

    async def check_health(self) -> None:
        """Health check, called periodically by Serve.

        Raises:
            RuntimeError: the rank group cannot be rebuilt on this replica.
        """
        if self._broken is not None:
            raise RuntimeError(self._broken)

    async def __del__(self) -> None:
        """Stops the ranks, so that they do not fail when the replica is gone. Called by Serve
        before the replica exits."""
        self._starting.cancel()
        if self._supervisor is not None:
            self._supervisor.cancel()
        await self._stop_ranks()
        self._loop_monitor.close()
        self.frontend.close()
        self._server.close()
        self._metrics.close()

    def _render(self, content_type: str) -> bytes:
        """Metrics of the worker."""
        frontend = self.frontend
        view = WorkerView(
            self._model_name,
            frontend.worker_id,
            frontend.epoch,
            frontend.info,
            frontend.load,
            frontend.latency,
        )
        return render(worker_metrics(view, vllm_names=self._vllm_names), content_type)

    def _socket_for(self, node_id: str) -> str | None:
        """Path of the socket for a gateway on node `node_id`; None if that is another node."""
        if node_id != ray.get_runtime_context().get_node_id():
            return None
        return self._server.path

    def _start_ranks(self, directory: str) -> Sequence[Coroutine[Any, Any, None]]:
        """Starts all ranks on `directory`; returns a coroutine per rank that ends when the rank
        does."""
        on_cuda = self.config.device == "cuda"
        placement_group = get_current_placement_group()
        for rank in range(self.config.tensor_parallel_size):
            # The class name is part of the process title: `ray::Rank1:WORKER.follow`.
            titled = type(f"Rank{rank}:{self.frontend.worker_id}", (RankActor,), {})
            actor_class = ray.remote(titled).options(
                num_cpus=0 if on_cuda else CPUS_PER_RANK,
                num_gpus=1 if on_cuda else 0,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group, placement_group_bundle_index=rank
                ),
            )
            actor = actor_class.remote()
            # An actor runs its calls in order, so this one comes before the long-running one.
            actor.belong_to.remote(self._model_name, self.frontend.worker_id)
            self._actors.append(actor)
        actors = tuple(self._actors)
        host = asyncio.ensure_future(_common_host(actors))
        return [
            _run_rank(rank, actor, self.config, directory, host)
            for rank, actor in enumerate(actors)
        ]

    async def _stop_ranks(self) -> None:
        """Stops all ranks immediately; they have no resources that outlive them."""
        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        self._actors.clear()

    async def _fetch(self) -> float:
        """Downloads the checkpoints to this node before any rank is started; returns the time
        taken, in seconds.

        Ranks on other nodes download them separately.
        """
        began = time.monotonic()
        await asyncio.to_thread(_fetch_checkpoints, self.config)
        return time.monotonic() - began

    async def _build(self) -> _Ranks:
        """Starts the ranks of the frontend's current epoch and waits until all are ready."""
        fetch_s = await self._fetch()
        ranks = _Ranks(self._start_ranks(self.frontend.open()))
        ready = asyncio.ensure_future(self.frontend.wait_ready())
        try:
            await asyncio.wait({ready, *ranks.tasks}, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                reason, heals = await ranks.failure_reason(), ranks.may_heal
                self.frontend.engine_lost(reason)
                await self._stop_ranks()
                message = f"the worker group failed to start: {reason}"
                raise RemoteFailure(message, heals=heals)
            phases = ready.result().startup
            phases["download"] = phases.get("download", 0.0) + fetch_s
            took = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in phases.items())
            logger.info("worker group ready: %s", took)
        finally:
            ready.cancel()
        return ranks

    async def _supervise(self, ranks: _Ranks) -> None:
        """Replaces the rank group whenever one of its ranks exits."""
        while True:
            broken = asyncio.ensure_future(self.frontend.wait_broken())
            await asyncio.wait({broken, *ranks.tasks}, return_when=asyncio.FIRST_COMPLETED)
            reason = broken.result() if broken.done() else await ranks.failure_reason()
            broken.cancel()
            logger.error("worker group failed, rebuilding: %s", reason)
            self.frontend.engine_lost(reason)
            await self._stop_ranks()
            rebuilt = await self._rebuild()
            if rebuilt is None:
                return
            ranks = rebuilt

    async def _rebuild(self) -> _Ranks | None:
        for attempt in range(MAX_FAILED_REBUILDS):
            try:
                return await self._build()
            except Exception as error:
                self._broken = None if attempt + 1 < MAX_FAILED_REBUILDS else str(error)
                logger.exception("rebuild %d of %d failed", attempt + 1, MAX_FAILED_REBUILDS)
                await asyncio.sleep(2**attempt)
        return None


def metrics_directory() -> str:
    """Folder for the metrics sockets of this node's processes in this cluster."""
    directory = os.environ.get("RAYFLEET_RUNTIME_DIRECTORY")
    if directory is not None:
        return f"{directory}/metrics"
    return f"/tmp/rf-{os.getuid()}-{ray.get_runtime_context().get_session_name()}"


def _publish(worker_id: str, value: bytes) -> None:
    """Publishes a heartbeat in Ray's key-value store, where gateways on all nodes read it."""
    internal_kv._internal_kv_put(
        heartbeat_key(worker_id), value, overwrite=True, namespace="rayfleet"
    )


class _Ranks:
    """Running ranks of one epoch."""

    def __init__(self, ranks: Sequence[Coroutine[Any, Any, None]]) -> None:
        self.tasks = [asyncio.ensure_future(rank) for rank in ranks]

    @property
    def may_heal(self) -> bool:
        """Whether restarting failed ranks may succeed.

        Always True if a rank was killed, since the other ranks' errors are then only a consequence.
        """
        ended = [task.exception() for task in self.tasks if task.done() and not task.cancelled()]
        if any(error is None or isinstance(error, RayActorError) for error in ended):
            return True
        return all(may_heal(_cause(error)) for error in ended if error is not None)

    async def failure_reason(self) -> str:
        """Waits up to LAST_WORDS_S for all ranks' errors after one has exited, and returns them.
        The most likely root cause is listed last.

        A killed rank leaves no error, and the others then fail in their next collective operation.
        Their errors are therefore listed first, followed by ranks that exited without an error.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await asyncio.wait(self.tasks)
        words, silent = [], []
        for rank, task in enumerate(self.tasks):
            if not task.done() or task.cancelled():
                continue
            error = task.exception()
            if error is None or isinstance(error, RayActorError):
                silent.append(f"rank {rank} exited without an error (killed, or out of memory)")
            else:
                words.append(_root_cause(error))
        # Rank 0 is connected to all others, so its error has the most detail.
        return "\n".join([*reversed(words), *silent])


async def _common_host(actors: Sequence[Any]) -> str:
    """Rank 0's address if the ranks are on several nodes, otherwise empty.

    Waits until all ranks are scheduled, which may take until another node has joined the cluster.
    """
    if len(actors) == 1:
        return ""
    nodes = await asyncio.gather(*(actor.node.remote() for actor in actors))
    return nodes[0][1] if len({node_id for node_id, _ in nodes}) > 1 else ""


async def _run_rank(
    rank: int, actor: Any, config: EngineConfig, directory: str, host: asyncio.Future[str]
) -> None:
    """Runs a rank in its actor; returns or raises when the rank exits."""
    address = await asyncio.shield(host)
    if rank == 0:
        await actor.lead.remote(config, directory, address)
        return
    rendezvous = None
    while address and (rendezvous := published(directory)) is None:
        await asyncio.sleep(_RENDEZVOUS_POLL_S)
    await actor.follow.remote(rank, config, directory, rendezvous)


def _fetch_checkpoints(config: EngineConfig) -> None:
    """Downloads checkpoints from the Hub. Raises ValueError for unsupported checkpoints or LoRA
    adapters."""
    weights = config.load_format != "dummy"
    model = load_model_config(config.checkpoint, weights=weights, pooling=config.pooling)
    if config.draft_checkpoint:
        load_model_config(config.draft_checkpoint, weights=weights)
    if config.head_checkpoint:
        read_eagle(config.head_checkpoint, model, weights=weights)
    if config.lora is not None:
        static_adapters(config.lora.folders, config.lora.max_lora_rank)


def _root_cause(error: BaseException) -> str:
    cause = _cause(error)
    return f"{type(cause).__name__}: {cause}"


def _cause(error: BaseException) -> BaseException:
    return error.cause if isinstance(error, RayTaskError) else error
