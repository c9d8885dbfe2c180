"""`gpu.sh` and its steps: commands exist, and failing steps do not stop the others."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster.bench.cli import add_commands
from cluster.cli.parser import CommandParser
from cluster.cli.serve import add_arguments
from deploy.benchmarks import cli as benchmarks
from deploy.benchmarks import gpu, gpu_models
from worker.models.config.model_config import load_model_config


def python(script: str) -> list[str]:
    return [sys.executable, "-S", "-c", script]


def test_every_command_is_one(tmp_path: Path) -> None:
    assert len(gpu.make_steps("python", tmp_path / "one", "vllm", 1)) == 34
    steps = gpu.make_steps("python", tmp_path, "vllm", 2)
    assert len({step.name for step in steps}) == len(steps) == 35
    parsers = {"cluster.bench": add_commands, "deploy.benchmarks": benchmarks.add_commands}
    for step in steps:
        program, *rest = step.command
        assert program == "python"
        if rest[1] in parsers:
            parser = argparse.ArgumentParser()
            parsers[rest[1]](parser.add_subparsers(dest="bench", required=True))
            parser.parse_args(rest[2:])
    ours = steps[-1].servers[1].command
    serve = CommandParser()
    add_arguments(serve)
    assert serve.parse_args(ours[4:]).port == 8100
    models = {
        name: load_model_config(str(tmp_path / name), weights=False) for name in gpu_models.MODELS
    }
    assert models["8b"].max_model_len >= 100_000 + 64
    assert {name for name, model in models.items() if model.moe is not None} == {
        "30b-a3b",
        "gpt-oss-20b",
        "qwen3.5-35b-a3b-fp8",
        "deepseek-v2-lite",
    }
    assert {name for name, model in models.items() if model.quantization is not None} == {
        "8b-fp8",
        "8b-int4",
        "gpt-oss-20b",
        "qwen3.5-35b-a3b-fp8",
    }
    assert {model.dtype for model in models.values()} == {"bfloat16"}
    loads = [step.command for step in steps if step.name.startswith("serve-")]
    seeds = [load[load.index("--seed") + 1] for load in loads]
    assert len(set(seeds)) == len(seeds) == 3


def test_whatever_fails_the_rest_is_measured(tmp_path: Path) -> None:
    check = {"name": "speed", "value": 1.0, "unit": "x", "goal": ">= 2", "holds": False}
    missed = json.dumps({"checks": [check], "models": {"8b": {"us": 12.5}}})
    began = time.monotonic()
    steps = [
        gpu.Step(name="breaks", command=python("import sys; sys.exit('no such device')")),
        gpu.Step(name="babbles", command=python("print('not JSON')")),
        gpu.Step(name="hangs", command=python("import time; time.sleep(600)"), limit_s=0.3),
        gpu.Step(name="misses", command=python(f"print({missed!r})")),
        gpu.Step(name="is not there", command=["/no/such/program"]),
        gpu.Step(
            name="serves nobody",
            command=python("print('{}')"),
            servers=[
                gpu.Server(command=python("raise SystemExit('no port')"), url="http://[::1]:9")
            ],
        ),
        gpu.Step(name="tests", command=python("print('3 passed')"), is_json=False),
        gpu.Step(
            name="works",
            command=python(
                "import os; print('{\"tokens_per_second\": ' + os.environ['SPEED'] + '}')"
            ),
            environment={"SPEED": "10"},
        ),
    ]
    report = gpu.run_steps(steps, tmp_path / "results")
    assert {name: step["status"] for name, step in report["steps"].items()} == {
        "breaks": "failed",
        "babbles": "failed",
        "hangs": "hung",
        "misses": "missed",
        "is not there": "failed",
        "serves nobody": "failed",
        "tests": "ok",
        "works": "ok",
    }
    assert time.monotonic() - began < 60.0
    assert json.loads((tmp_path / "results" / "gpu.json").read_text()) == report
    page = (tmp_path / "results" / "gpu.md").read_text()
    for text in (
        "no such device",
        "| hangs | hung |",
        "speed: 1 x (>= 2) **missed**",
        "models.8b.us: 12.5",
        "does not respond: no port",
        "3 passed",
        "`SPEED=10 python -S ",
        "tokens_per_second: 10",
    ):
        assert text in page, page


def test_a_run_that_is_cut_off_leaves_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_step(step: gpu.Step) -> dict[str, object]:
        if step.name == "second":
            raise KeyboardInterrupt
        return {"command": "", "status": "ok", "seconds": 1.0}

    monkeypatch.setattr(gpu, "run_step", run_step)
    steps = [gpu.Step(name=name, command=[]) for name in ("first", "second")]
    with pytest.raises(KeyboardInterrupt):
        gpu.run_steps(steps, tmp_path)
    assert list(json.loads((tmp_path / "gpu.json").read_text())["steps"]) == ["first"]


def test_a_report_has_no_folder_of_its_machine(tmp_path: Path) -> None:
    steps = gpu.make_steps(sys.executable, tmp_path, None, 1)
    for command in (gpu.as_typed(step.command) for step in steps):
        assert command.startswith("python -m ")
        assert str(gpu.ROOT) not in command
        assert sys.executable not in command


@pytest.mark.parametrize("is_skipped", [False, True], ids=["fails", "left out"])
def test_without_a_peer_ours_is_measured_all_the_same(tmp_path: Path, is_skipped: bool) -> None:
    """vLLM cannot be installed, or is skipped by WITHOUT_PEER; FlashAttention cannot be either."""
    script = tmp_path / "deploy" / "benchmarks" / "gpu.sh"
    script.parent.mkdir(parents=True)
    shutil.copy(gpu.ROOT / "deploy" / "benchmarks" / "gpu.sh", script)
    program, calls = tmp_path / "python", tmp_path / "asked"
    program.write_text(f'#!/bin/sh\necho "$@" >> {calls}\ntest "$2" != venv -a "$2" != pip\n')
    program.chmod(0o700)
    given = {"WITHOUT_PEER": "1"} if is_skipped else {}
    ran = subprocess.run(
        ["sh", str(script), "there"],
        env={"PYTHON": str(program), "PATH": "/usr/bin:/bin", **given},
        capture_output=True,
        text=True,
        check=True,
    )
    *before, last = calls.read_text().splitlines()
    assert last == "-m deploy.benchmarks.gpu --out there"
    flash = "-m pip install --quiet -c constraints.txt -e .[gpu]"
    assert before == ([flash] if is_skipped else ["-m venv .venv-vllm", flash])
    assert ("measured without it" in ran.stderr) != is_skipped
