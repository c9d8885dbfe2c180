"""WorkerGroup with another engine in place of its ranks, such as a paced worker, for benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import ray
from ray import serve

from cluster.app import build_application
from cluster.config import ServeConfig
from worker.config import EngineConfig
from worker.group import WorkerGroup

ServeEngine = Callable[[EngineConfig, str], None]
"""Function that serves as the engine of the worker frontend that owns a directory, until the
frontend exits."""


class PacedRank:
    """Ray actor that runs an engine in place of rank 0."""

    def run(self, serve_engine: ServeEngine, config: EngineConfig, directory: str) -> None:
        """Runs the engine. Blocks until it ends."""
        serve_engine(config, directory)


def build_paced(
    config: ServeConfig, serve_engine: ServeEngine, *, sockets: bool = True
) -> serve.Application:
    """The real application for `config`, including the workers' frontends, with another engine.

    Args:
        config: configuration of the fleet.
        serve_engine: the engine: a module-level function, or a partial of one.
        sockets: whether gateways may use sockets; if not, all are treated as if on another node.
    """

    class PacedWorkerGroup(WorkerGroup):
        """WorkerGroup with the engine bound to the class, because Serve passes only its usual
        arguments."""

        async def _fetch(self) -> float:
            """Returns 0 seconds: no weights are needed, so nothing is downloaded."""
            return 0.0

        def _start_ranks(self, directory: str) -> Sequence[Coroutine[Any, Any, None]]:
            actor = ray.remote(PacedRank).options(num_cpus=0).remote()
            self._actors.append(actor)

            async def ended() -> None:
                await actor.run.remote(serve_engine, self.config, directory)

            return [ended()]

        def _socket_for(self, node_id: str) -> str | None:
            return super()._socket_for(node_id) if sockets else None

    return build_application(config, PacedWorkerGroup)
