"""Configurations of released models: each is read as the table says, or refused for a reason that
its owner finds in it and can act on."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.support.worker.real_configs import VERDICTS, RealConfig, load_corpus, verdict
from worker.models.families import FAMILIES, find_family

CORPUS = load_corpus()
EXPECTED: dict[str, dict[str, Any]] = json.loads(VERDICTS.read_text(encoding="utf-8"))
ACCEPTED = [real for real in CORPUS if "accepted" in EXPECTED[real.name]]
REFUSED = [real for real in CORPUS if "refused" in EXPECTED[real.name]]
REMEDY = re.compile(r": .*\b(use|repair|it must be|merge|remove)\b")


@pytest.mark.parametrize("real", CORPUS, ids=lambda real: real.name)
def test_a_real_configuration_is_read_as_the_table_says(real: RealConfig) -> None:
    """The table is written by tests/support/worker/real_configs.py --write."""
    assert verdict(real) == EXPECTED[real.name]


def test_the_table_is_of_these_configurations() -> None:
    assert list(EXPECTED) == [real.name for real in CORPUS]
    assert len(CORPUS) >= 150


@pytest.mark.parametrize("real", REFUSED, ids=lambda real: real.name)
def test_a_refusal_names_what_is_there_and_a_remedy(real: RealConfig) -> None:
    reason = EXPECTED[real.name]["refused"]
    key = next((key for key in real.config if re.match(rf"{re.escape(key)}\b", reason)), None)
    file = next((name for name in real.files if name in reason), None)
    assert key or file, reason
    assert REMEDY.search(reason), reason


@pytest.mark.parametrize("architecture", FAMILIES)
def test_each_family_has_a_real_model(architecture: str) -> None:
    assert any(find_family(real.config)[0] == architecture for real in ACCEPTED)
