"""The table of comparisons: variants, checks, commands and the README."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from cluster.bench.report import Check
from deploy.benchmarks.ab.presets import PRESETS
from deploy.benchmarks.ab.table import README, with_table
from deploy.benchmarks.cli import main
from worker.config import EngineConfig
from worker.protocol.options import option_values


def test_the_readme_has_the_current_table() -> None:
    text = README.read_text()
    assert text == with_table(text), "run `python -m deploy.benchmarks.ab.table`"


@pytest.mark.parametrize("name", PRESETS)
def test_variants_differ_in_their_options_only(name: str) -> None:
    assert find_spec(f"deploy.benchmarks.ab.{name}") is not None
    preset, engine = PRESETS[name], EngineConfig(model="m")
    given = option_values(engine)
    for variant, options in preset.variants.items():
        found = option_values(preset.config(variant, engine, max_num_seqs=7))
        assert found == given | options | {"max_num_seqs": 7}


@pytest.mark.parametrize("name", PRESETS)
def test_what_a_comparison_sets_has_no_flag(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([name, "--help"])
    text = capsys.readouterr().out
    assert PRESETS[name].measures.split(",")[0] in " ".join(text.split())
    for option in PRESETS[name].set_here - {"model", "max_num_seqs"}:
        assert f"--{option.replace('_', '-')} " not in text, option


def test_the_first_goal_that_matches_applies() -> None:
    figures = {"forwards_ratio_4": 1.5, "forwards_ratio_3": 1.5, "full_forwards_ratio_4": 0.0}
    assert PRESETS["fdfo"].checks(figures | {"long_prompt_wall_ratio_4": 0.0}) == [
        Check(name="forwards_ratio_4", value=1.5, unit="", goal=">= 1.68", holds=False),
        Check(name="forwards_ratio_3", value=1.5, unit="", goal=">= 1", holds=True),
    ]
