"""A WorkerGroup whose engine only takes time, in a process of its own. For benchmarks and tests."""

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
"""Is the engine of the worker front that owns a directory, for as long as the front lives."""


class PacedRank:
    """Runs an engine in place of rank 0."""

    def run(self, serve_engine: ServeEngine, config: EngineConfig, directory: str) -> None:
        """Blocks for as long as the actor lives."""
        serve_engine(config, directory)


def build_paced(
    config: ServeConfig, serve_engine: ServeEngine, *, sockets: bool = True
) -> serve.Application:
    """The application for `config` as it is, down to the worker's front; then another engine.

    Args:
        config: of the fleet.
        serve_engine: the engine; a function of a module, or a partial of one.
        sockets: whether gateways are offered any; else each is as if on another node.
    """

    class PacedWorkerGroup(WorkerGroup):
        """Options are part of the class: Serve hands the constructor a config alone."""

        async def _fetch(self) -> float:
            """Needs no weights."""
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
