from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest

from tests.support.router.rig import Rig, build_checkpoint, events
from worker.wire.tokenizer import Tokenizer, load_tokenizer


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


@pytest.fixture(name="events")
def events_fixture() -> Callable[[httpx.Response], list[dict]]:
    return events
