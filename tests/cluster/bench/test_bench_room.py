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


@pytest.mark.parametrize("name", ["chaos", "fleet", "gateway"])
def test_commands_that_became_checks_say_so(capsys: pytest.CaptureFixture[str], name: str) -> None:
    with pytest.raises(SystemExit):
        cli.main([name, "--json"])
    assert "is now `make check-" in capsys.readouterr().err
