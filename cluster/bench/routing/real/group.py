"""A WorkerGroup of ours whose engine is a paced worker, in a process of its own."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

import ray
from ray import serve

from cluster.app import build_application
from cluster.bench.routing.workload import FleetShape
from cluster.config import ServeConfig
from worker.group import WorkerGroup


class PacedOptions(Protocol):
    """What a worker pretends to be."""

    @property
    def shape(self) -> FleetShape:
        """Its limits, and how long its steps take at a pace of 1."""

    @property
    def pace(self) -> float:
        """How much longer they take."""


class PacedRank:
    """Runs the paced worker in place of rank 0."""

    def run(self, model: str, options: PacedOptions, directory: str) -> None:
        """Blocks for as long as the actor lives."""
        from cluster.bench.routing.real.paced import paced_worker, serve_front

        serve_front(paced_worker(model, options.shape, options.pace), directory)


def build(config: ServeConfig, options: PacedOptions) -> serve.Application:
    """The application for `config` as it is, down to the worker's front; then paced workers."""

    class PacedWorkerGroup(WorkerGroup):
        """Options are part of the class: Serve hands the constructor a config alone."""

        async def _fetch(self) -> float:
            """Needs no weights."""
            return 0.0

        def _start_ranks(self, directory: str) -> Sequence[Coroutine[Any, Any, None]]:
            actor = ray.remote(PacedRank).options(num_cpus=0).remote()
            self._actors.append(actor)

            async def ended() -> None:
                await actor.run.remote(self.config.model, options, directory)

            return [ended()]

    return build_application(config, PacedWorkerGroup)
