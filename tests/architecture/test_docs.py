"""Documents lead to files, sections and folders that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.sources import FLOORS, sources

DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", *(f"{folder}/**/README.md" for folder in (*FLOORS, "deploy", "helm")))
    for path in ROOT.glob(pattern)
)
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")
MAX_ENTRY = 140
"""Maximum number of characters of a line in CHANGELOG.md."""
CODE_PATH = re.compile(r"`((?:cluster|deploy|helm|kernels|router|tests|worker)/[\w./-]*)`")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_to_files_and_sections(document: str) -> None:
    path = ROOT / document
    broken = []
    for target, section in LINK.findall(path.read_text()):
        linked = path.parent / target if target else path
        if not linked.exists():
            broken.append(target)
        elif section and linked.is_file() and section not in _sections(linked):
            broken.append(f"{target}#{section}")
    assert broken == []


def test_the_contributors_guide_names_files_that_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = CODE_PATH.findall(text)
    assert len(named) > 40
    missing = {name for name in named if "NAME" not in name and not (ROOT / name).exists()}
    assert missing == set()


def test_messages_name_sections_of_the_readme_that_exist() -> None:
    sections = set(re.findall(r"^## (.*)$", (ROOT / "README.md").read_text(), re.MULTILINE))
    named = {
        name
        for source in sources(*FLOORS)
        for name in re.findall(r'README, "([^"]+)"', source.text)
    }
    assert named
    assert named <= sections


def test_entries_of_the_changelog_are_short_lines() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    assert [line for line in lines if len(line) > MAX_ENTRY] == []


def _sections(path: Path) -> set[str]:
    """Anchors that GitHub gives to the headings of a file."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
