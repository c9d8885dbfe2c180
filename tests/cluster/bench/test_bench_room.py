"""Research benchmarks are part of a checkout, but not of the wheel."""

from __future__ import annotations

import tomllib

import pytest
from setuptools import find_packages

from cluster.bench import cli
from tests.support.paths import ROOT


def test_the_wheel_only_has_benchmarks_of_endpoints() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = find_packages(str(ROOT), **settings["packages"]["find"])
    assert {"cluster.bench", "cluster.bench.jobs", "router", "worker.core", "kernels"} <= set(found)
    assert not [name for name in found if name.startswith(("deploy", "tests"))]


@pytest.mark.parametrize(
    ("name", "now"),
    [
        ("chaos", "make check-chaos"),
        ("fleet", "make check-scale"),
        ("gateway", "make check-gateway"),
        ("versus", "bench compare"),
        ("router", "python -m deploy.benchmarks router"),
    ],
)
def test_moved_commands_name_their_replacement(
    capsys: pytest.CaptureFixture[str], name: str, now: str
) -> None:
    with pytest.raises(SystemExit):
        cli.main([name, "--json"])
    assert f"bench {name} is now `{now}" in capsys.readouterr().err
