"""The built wheel serves by itself, in a separate environment outside of the source tree. The fleet
of all tests runs from the wheel."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tests.support.deploy.wheel import PACKAGES
from tests.support.fleet.running_fleet import ELASTIC, RunningFleet
from tests.support.paths import MODELS, ROOT


def test_all_that_is_read_at_run_time_is_in_it(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.*")
        if path.is_file() and path.suffix not in (".pyc", ".md")
    }
    demo = {f"cluster/demo/{path.name}" for path in (MODELS / "demo").iterdir()}
    assert {"kernels/native/src/library.cpp", "cluster/demo/model.safetensors"} < sources | demo
    assert sources | demo <= names


def test_it_serves_where_there_is_no_source_tree(
    fleet: RunningFleet, installed: Path, installed_demo: Path
) -> None:
    assert installed_demo.is_relative_to(installed.parent)
    command_line = Path(f"/proc/{fleet.process.pid}/cmdline").read_bytes().decode()
    assert str(installed / "rayfleet") in command_line


@pytest.mark.long  # tests/router/test_on_demand.py has workers that are started for a request
def test_its_demo_is_started_for_a_request(fleet: RunningFleet) -> None:
    chat = fleet.client.chat.completions.create(
        model=ELASTIC,
        messages=[{"role": "user", "content": "What is 12 + 30?"}],
        temperature=0,
    )
    assert "42" in str(chat.choices[0].message.content)
