"""tested_families.json and the README's table match the tests' marks."""

from __future__ import annotations

import json

from tests.support.worker.tested_models import generated_part, read_tests, table
from worker.models.config import tested_families
from worker.models.config.families import FAMILIES, MULTIMODAL
from worker.models.config.tested_families import CHECKS, RECORD

MODES = ("alone", "batched", "prefix hit", "chunks", "scarce", "TP 2", "mutations")
RENEW = "make families"


def test_record_and_readme_are_what_the_tests_say() -> None:
    assert json.loads(RECORD.read_text(encoding="utf-8")) == read_tests(), RENEW
    assert generated_part() == table(tested_families.tested_families()), RENEW


def test_all_served_families_are_listed() -> None:
    families = tested_families.tested_families()
    assert [family.architecture for family in families] == [*FAMILIES, *MULTIMODAL]
    listed = {check for family in families for check in family.checks}
    assert listed == set(CHECKS)
    assert all(one.families and one.against for one in tested_families.tested_formats())


def test_every_family_is_checked_in_every_mode() -> None:
    """So that new families are tested in all modes."""
    lacking = {
        family.architecture: [mode for mode in MODES if mode not in family.checks]
        for family in tested_families.tested_families()
    }
    assert {name: modes for name, modes in lacking.items() if modes} == {}
