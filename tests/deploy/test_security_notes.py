"""SECURITY.md names existing flags, routes and variables."""

from __future__ import annotations

import re

import pytest

from cluster.cli.main import main
from cluster.config import API_KEY
from router.api.http.auth import OPEN_PATHS
from router.page.routes import PAGE_FILES
from tests.support.paths import ROOT

TEXT = (ROOT / "SECURITY.md").read_text()
OTHER_COMMANDS = {"--help", "--build", "--model", "--no-deps"}
"""Flags in README that do not belong to `rayfleet serve`."""


def test_the_readme_leads_there() -> None:
    assert "(SECURITY.md)" in (ROOT / "README.md").read_text()


def test_flags_routes_and_variables_are_ours(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help=all"])
    known = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    readme = (ROOT / "README.md").read_text()
    for text in (TEXT, readme):
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) - OTHER_COMMANDS
        assert len(named) > 5
        assert named <= known
    assert f"`{API_KEY}`" in TEXT
    assert all(f"`{path}`" in TEXT for path in (*OPEN_PATHS, PAGE_FILES))


def test_it_says_who_is_trusted_and_how_to_report() -> None:
    for section in ("Reporting", "Trust model", "Access control", "Between nodes"):
        assert f"\n## {section}\n" in TEXT
