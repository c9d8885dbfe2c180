from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest

from router.channel import channel
from router.channel.heartbeat_timeout import TICK_S
from tests.support.router import stub_worker
from tests.support.router.agent import agent_rig, build_agent
from tests.support.router.rig import Rig, build_checkpoint, events
from worker.protocol.text.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    build_checkpoint(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return load_tokenizer(str(checkpoint))


@pytest.fixture
async def rig(checkpoint: Path, tokenizer: Tokenizer) -> AsyncIterator[Rig]:
    rig = Rig(checkpoint, tokenizer)
    yield rig
    await rig.stop()


@pytest.fixture(scope="session")
def agent_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tokenizer]:
    """Checkpoint and tokenizer of a model with reasoning and tools."""
    folder = tmp_path_factory.mktemp("agent")
    build_agent(folder)
    return folder, load_tokenizer(str(folder))


@pytest.fixture
async def agent(agent_model: tuple[Path, Tokenizer]) -> AsyncIterator[Rig]:
    rig = agent_rig(*agent_model)
    await rig.start()
    yield rig
    await rig.stop()


@pytest.fixture
def short_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeat timeouts count ticks; as many ticks as usual pass between two heartbeats."""
    shorter = 0.2
    monkeypatch.setattr(channel, "TICK_S", shorter * TICK_S)
    monkeypatch.setattr(stub_worker, "HEARTBEAT_S", shorter * stub_worker.HEARTBEAT_S)


@pytest.fixture(name="events")
def events_fixture() -> Callable[[httpx.Response], list[dict]]:
    return events
