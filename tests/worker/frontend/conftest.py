"""A frontend with simulated engine and gateways: real sockets, real messages."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.worker.played_engine import Engine
from worker.frontend.server import WorkerFrontend


@pytest.fixture
async def front() -> AsyncIterator[WorkerFrontend]:
    # The simulated engine reports when a test needs it: its silence is not an error.
    front = WorkerFrontend("w0", "/tmp", step_timeout_s=0.0)
    yield front
    front.close()


@pytest.fixture
async def engine(front: WorkerFrontend) -> AsyncIterator[Engine]:
    """A ready engine, connected to `front`."""
    engine = Engine(front.open())
    await engine.ready()
    await front.wait_ready()
    yield engine
    engine.close()
