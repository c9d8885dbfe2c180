"""`rayfleet models` finds families by name and by released models."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from cluster.cli.main import main


def output(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["models", *argv])
    assert ended.value.code == code
    return capsys.readouterr().out


def test_the_table_has_all_families_and_formats(capsys: pytest.CaptureFixture[str]) -> None:
    lines = output(capsys).splitlines()
    (row,) = (line for line in lines if line.startswith("Qwen3ForCausalLM "))
    place = lines[0].index("native")
    assert row[place : place + len("native")].strip() == "x"
    place = lines[0].index("blocks")
    assert row[place : place + len("blocks")].strip() == "-"
    assert any("awq" in line and "dequantized" in line for line in lines)


def test_a_closed_pipe_ends_a_command_without_a_traceback() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "cluster.cli.main", "models"]
    ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (1, "")


@pytest.mark.parametrize("name", ["qwen3forcausal", "Qwen/Qwen3-8B", "qwen3-8b"])
def test_a_name_prints_the_details_of_its_family(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = output(capsys, name)
    assert text.startswith("Qwen3ForCausalLM\n  model_type: qwen3\n")
    assert "two ranks (compared with: transformers)" in text
    assert "Qwen/Qwen3-8B" in text


def test_multimodal_families_are_listed_as_text_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert "text only, served as MistralForCausalLM or Ministral3" in output(
        capsys, "Mistral3ForConditional"
    )


def test_json_has_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    details = json.loads(output(capsys, "qwen3-8b", "--json"))
    (family,) = details["families"]
    assert family["checks"]["TP 2"] == ["transformers"]
    assert "Qwen/Qwen3-8B" in family["released"]
    assert "awq" in {weights["name"] for weights in details["formats"]}


def test_an_unknown_name_ends_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no model family" in output(capsys, "nothing-of-it", code=1)
