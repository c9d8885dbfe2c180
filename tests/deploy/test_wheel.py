"""The built wheel serves by itself: in an environment of its own, far from the source tree.

What it depends on comes from this environment, through a path file: no second copy of torch.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from openai import OpenAI

from cluster.ports import free_ports
from tests.support.fleet.running_fleet import RunningFleet, stop_fleet
from tests.support.paths import ROOT

PACKAGES = ("cluster", "router", "worker", "kernels")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: what earlier builds have left in the source tree would get into it."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    clean = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in (*PACKAGES, "deploy/models/demo"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=clean)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder)]
    pip("wheel", "--quiet", *options, str(source))
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of executables of an environment with the wheel in it."""
    environment = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    pip("--python", str(python), "install", "--quiet", "--no-deps", "--no-index", str(wheel))
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python.parent


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments], check=True, timeout=200)


def test_all_that_is_read_at_run_time_is_in_it(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.*")
        if path.is_file() and path.suffix not in (".pyc", ".md")
    }
    demo = {f"cluster/demo/{path.name}" for path in (ROOT / "deploy/models/demo").iterdir()}
    assert {"kernels/native/src/library.cpp", "cluster/demo/model.safetensors"} < sources | demo
    assert (sources | demo) - names == set()


@pytest.mark.e2e
def test_it_serves_the_demo_where_there_is_no_source_tree(installed: Path, tmp_path: Path) -> None:
    where = subprocess.run(
        [
            installed / "python",
            "-c",
            "import cluster, worker, router, kernels; print(cluster.__file__)",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(where.stdout.strip()).is_relative_to(installed.parent)
    port = free_ports(1)[0]
    base_url = f"http://127.0.0.1:{port}"
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen(
        [installed / "rayfleet", "serve", "--port", str(port), "--device", "cpu"],
        cwd=tmp_path,
        env={**inherited, "RAYFLEET_TEST": base_url},
        start_new_session=True,
    )
    fleet = RunningFleet(process, base_url)
    try:
        fleet.wait_ready(num_workers=1)
        client = OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=60)
        chat = client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "What is 12 + 30?"}],
            temperature=0,
        )
        assert "42" in str(chat.choices[0].message.content)
    finally:
        stop_fleet(fleet)
