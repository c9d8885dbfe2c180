"""One fleet for all end-to-end tests, started by the command: two workers of two ranks each, and a
second model that has no worker while nobody asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.fleet.running_fleet import (
    RunningFleet,
    models_of,
    start_fleet,
    stop_fleet,
)

TEST_TIMEOUT_S = 900
"""Several deadlines and the start of the fleet."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_S))


@pytest.fixture(scope="session")
def fleet(tiny_chat_model: Path) -> Iterator[RunningFleet]:
    folder = tiny_chat_model.parent
    config = folder / "fleet.yaml"
    config.write_text(yaml.safe_dump({"models": models_of(tiny_chat_model)}))
    fleet = start_fleet(folder, "--config", str(config))
    try:
        fleet.wait_ready(num_workers=2)
        yield fleet
    finally:
        stop_fleet(fleet)
