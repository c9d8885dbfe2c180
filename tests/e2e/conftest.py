"""One fleet for all end-to-end tests: two workers of two ranks each, and a second model without
workers until it is requested. It is started from the built wheel, outside of the source tree."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.deploy.wheel import build_wheel, install_wheel
from tests.support.fleet.running_fleet import RunningFleet, models_of, start_fleet, stop_fleet

TEST_TIMEOUT_S = 1800
"""Several deadlines and the start of the fleet."""


OWN_RAY = (
    "test_late_starts.py",
    "test_nodes.py",
    "test_whole_experts.py",
)
SCALES = "test_autoscaling.py"
"""Its tests need the maximum number of workers of the second model; others need one."""
LAST = "test_proxy_loss.py"
"""Its tests kill the common fleet, whose idle processes would slow down all later tests."""


def _place(item: pytest.Item) -> int:
    """Tests with a cluster of their own come before the common fleet is started."""
    name = item.path.name
    return -1 if name in OWN_RAY else int(name == LAST)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_place)
    folder = Path(__file__).parent
    for item in items:
        if item.path.parent == folder:
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_S))


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of executables of an environment with the wheel in it."""
    return install_wheel(wheel, tmp_path_factory.mktemp("environment"))


@pytest.fixture(scope="session")
def installed_demo(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model as the wheel carries it."""
    done = subprocess.run(
        [
            *(installed / "python", "-c"),
            "from cluster.config import find_demo_model; print(find_demo_model())",
        ],
        cwd=tmp_path_factory.mktemp("nowhere"),
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=True,
    )
    return Path(done.stdout.strip())


@pytest.fixture(scope="session")
def fleet(
    request: pytest.FixtureRequest, tiny_chat_model: Path, installed: Path, installed_demo: Path
) -> Iterator[RunningFleet]:
    folder = tiny_chat_model.parent
    config = folder / "fleet.yaml"
    # All of them start for a single request, too, and each takes some CPU seconds.
    is_scaled = any(item.path.name == SCALES for item in request.session.items)
    models = models_of(tiny_chat_model, installed_demo, max_elastic=3 if is_scaled else 1)
    config.write_text(yaml.safe_dump({"models": models}))
    fleet = start_fleet(folder, "--config", str(config), installed=installed)
    try:
        fleet.wait_ready(num_workers=2)
        yield fleet
    finally:
        stop_fleet(fleet)
