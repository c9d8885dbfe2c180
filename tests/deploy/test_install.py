"""Packages that users get from the public index: `make check-install` for this Python only."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.cli.checks import OLDEST_DRIVERS
from deploy.supply.index import (
    IndexUnreachableError,
    NoSolutionError,
    environment_of_a_user,
    pins,
)
from tests.campaigns import install as install_check
from tests.campaigns.install import ROOT

CONSTRAINTS = ROOT / "constraints.txt"
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


def answers_to(question: Callable[[], dict[str, str]]) -> dict[str, str]:
    """The resolution; skips the test if the index is unreachable."""
    try:
        return question()
    except IndexUnreachableError as error:
        pytest.skip(f"the package index does not answer: {error}")


def check(constraints: Path, home: Path) -> dict[str, str]:
    return answers_to(
        lambda: install_check.check(constraints, home=home, python=PYTHON, machine="x86_64")
    )


def test_pins_and_extras_resolve(tmp_path: Path) -> None:
    found = check(CONSTRAINTS, tmp_path)
    assert "nvidia-nccl-cu13" in found, "this was not the build of torch that users get"
    assert found.items() >= {("torch", pins(CONSTRAINTS)["torch"])}
    driver = OLDEST_DRIVERS[int(found["nvidia-cuda-runtime"].split(".")[0])]
    assert f"NVIDIA driver {driver} or newer" in " ".join((ROOT / "README.md").read_text().split())


def test_a_triton_that_torch_does_not_take_is_found(tmp_path: Path) -> None:
    text = CONSTRAINTS.read_text()
    others = tmp_path / "constraints.txt"
    others.write_text(text.replace("triton==3.7.1", "triton==3.9.0"))
    assert others.read_text() != text
    with pytest.raises(NoSolutionError, match=r"torch==\S+ depends on triton"):
        check(others, tmp_path)


def test_no_setting_of_this_machine_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIP_FIND_LINKS", "PIP_CONFIG_FILE", "PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT"):
        monkeypatch.setenv(name, "/from/here")
    for name in ("UV_DEFAULT_INDEX", "UV_FIND_LINKS", "UV_CONSTRAINT", "UV_CONFIG_FILE"):
        monkeypatch.setenv(name, "/from/here")
    monkeypatch.setenv("SSL_CERT_FILE", "/a/certificate")
    home = Path("/a/home")
    seen = environment_of_a_user(os.environ, home)
    assert "/from/here" not in seen.values()
    assert seen["SSL_CERT_FILE"] == "/a/certificate"
    assert seen["HOME"] == "/a/home"


def test_an_unreachable_index_differs_from_a_missing_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")  # nothing listens there
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with pytest.raises(IndexUnreachableError):
        install_check.resolve("rich", home=tmp_path, python=PYTHON, machine="x86_64")
