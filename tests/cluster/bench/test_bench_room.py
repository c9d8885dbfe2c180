"""The simulator of routing is part of a checkout, and not of the wheel."""

from __future__ import annotations

import tomllib

import pytest
from setuptools import find_packages

from cluster.bench import cli
from tests.support.paths import ROOT


def test_the_wheel_has_the_benchmarks_and_not_the_simulator() -> None:
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = find_packages(str(ROOT), **told["packages"]["find"])
    assert {"cluster.bench", "cluster.bench.jobs", "router", "worker.core", "kernels"} <= set(found)
    assert not [name for name in found if name.startswith("cluster.bench.routing")]


@pytest.mark.parametrize("flags", [(), ("--real", "--scale", "0.1"), ("--help",)])
def test_without_it_the_command_says_where_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]
) -> None:
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        cli.main(["router", *flags])
    assert ended.value.code == 2
    assert "pip install -e ." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "now"),
    [
        ("chaos", "make check-chaos"),
        ("fleet", "make check-scale"),
        ("gateway", "make check-gateway"),
        ("versus", "bench compare"),
    ],
)
def test_commands_of_before_say_what_they_are_now(
    capsys: pytest.CaptureFixture[str], name: str, now: str
) -> None:
    with pytest.raises(SystemExit):
        cli.main([name, "--json"])
    assert f"bench {name} is now `{now}" in capsys.readouterr().err
