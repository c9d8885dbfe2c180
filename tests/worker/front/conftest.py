"""A frontend between an engine and gateways that tests play: real sockets, real messages."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.worker.played_engine import Engine
from worker.front.server import WorkerFrontend


@pytest.fixture
async def front() -> AsyncIterator[WorkerFrontend]:
    # A played engine reports when its test wants it to: its silence says nothing.
    front = WorkerFrontend("w0", "/tmp", step_timeout_s=0.0)
    yield front
    front.close()


@pytest.fixture
async def engine(front: WorkerFrontend) -> AsyncIterator[Engine]:
    """Ready, and known to `front`."""
    engine = Engine(front.open())
    await engine.ready()
    await front.wait_ready()
    yield engine
    engine.close()
