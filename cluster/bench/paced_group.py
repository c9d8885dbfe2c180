"""A WorkerGroup whose engine is the paced stub, in a process of its own. For benchmarks only."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any

import ray
from ray import serve

from cluster.app import build_application
from cluster.config import ServeConfig
from worker.config import EngineConfig
from worker.group import WorkerGroup


class PacedRank:
    """Runs the stub in place of rank 0."""

    def run(self, config: EngineConfig, directory: str, step_s: float) -> None:
        """Blocks for as long as the actor lives."""
        from cluster.bench.gateway.paced import paced_config, serve_paced

        serve_paced(paced_config(config, step_s), directory)


def build_paced(config: ServeConfig, step_s: float, *, sockets: bool = True) -> serve.Application:
    """The application for `config` as it is, down to the worker's front; then the stub.

    Without `sockets` gateways are offered none, as if each were on another node.
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
                await actor.run.remote(self.config, directory, step_s)

            return [ended()]

        def _socket_for(self, node_id: str) -> str | None:
            return super()._socket_for(node_id) if sockets else None

    return build_application(config, PacedWorkerGroup)
