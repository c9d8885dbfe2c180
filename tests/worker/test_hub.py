"""A worker group's checkpoint and a gateway's tokenizer are downloaded from a failing Hub.

The Hub is a real server on loopback, and the client library the real one, in a separate process: it
reads HF_ENDPOINT and HF_HOME on import.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT
from tests.support.worker.fake_hub import COMMIT, fake_hub
from worker.config import EngineConfig
from worker.models.config.checkpoint import resolve_checkpoint
from worker.protocol.hub import at_revision, commit_of, local_folder
from worker.protocol.text.tokenizer import load_tokenizer

DEMO = ROOT / "deploy" / "models" / "demo"
GOOD, MISSPELT, WEIGHTLESS = "org/demo", "org/dmeo", "org/weightless"

START = """
import asyncio, json, math, sys
from worker.config import EngineConfig
from worker.group import _fetch_checkpoints
from worker.protocol import retry
from worker.protocol.retry import until_started
from worker.protocol.text.tokenizer import load_tokenizer

retry.FIRST_DELAY_S = 0.1

def start(repository):
    config = EngineConfig.of(model=repository, device="cpu")
    async def attempt():
        await asyncio.to_thread(_fetch_checkpoints, config)
        return load_tokenizer(repository).vocab_size
    reports, error = [], ""
    try:
        asyncio.run(until_started(attempt, retry_s=math.inf, report=reports.append))
    except ValueError as failure:
        error = str(failure)
    return {"error": error, "reports": [report and report.reason for report in reports]}

print(json.dumps({repository: start(repository) for repository in sys.argv[1:]}))
"""
GENERATE = """
import sys
from worker.llm import LLM, SamplingParams
with LLM(sys.argv[1], device="cpu", cpu_threads=1, kv_cache_tokens=1024) as llm:
    sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    [output] = llm.generate(["What is 1 + 1?"], sampling)
    print(len(output.outputs[0].token_ids))
"""


FLEET = """
import json, os, sys
sys.path.insert(0, os.getcwd())
from cluster.app import build_app
from router.gateway import Gateway
from worker.group import _fetch_checkpoints

options = {"speculative_method": "draft", "speculative_model": sys.argv[1], "device": "cpu"}
tagged = {"speculative_revision": "v1", "served_model_name": "m"}
deployment = build_app({"models": [{"model": sys.argv[1], **options, **tagged}]})._bound_deployment
config = deployment.init_args[0]
engine = deployment.init_args[1]["m"]._bound_deployment.init_args[0]
found = [config.models[0].revision, engine.revision, engine.speculative.revision]
print(json.dumps(found), flush=True)
sys.stdin.readline()
Gateway(config, {"m": None})._load(config.models[0])
_fetch_checkpoints(engine)
"""


def run(code: str, hub: str, home: Path, *repositories: str) -> list[Any]:
    command = [sys.executable, "-c", code, *repositories]
    environment = environment_of(hub, home)
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def environment_of(hub: str, home: Path) -> dict[str, str]:
    environment = {**os.environ, "HF_ENDPOINT": hub, "HF_HOME": str(home)}
    environment.pop("HF_HUB_OFFLINE", None)
    return environment


def test_a_fleet_reads_the_commits_that_there_were_when_it_was_built(tmp_path: Path) -> None:
    """Independent of when a gateway or worker starts: tokenizer and weights belong together."""
    other, later = "1" * 40, "2" * 40
    with fake_hub({GOOD: DEMO}, failures=[]) as hub:
        hub.revisions["v1"] = other
        process = subprocess.Popen(
            [sys.executable, "-c", FLEET, GOOD],
            env=environment_of(hub.url, tmp_path),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        assert json.loads(line) == [COMMIT, COMMIT, other]
        assert (hub.requested.count("main"), hub.requested.count("v1")) == (1, 1)
        hub.revisions.update(main=later, v1=later)
        hub.requested.clear()
        _, errors = process.communicate("\n", timeout=600)
        assert process.returncode == 0, errors
        assert set(hub.requested) == {COMMIT, other}


def test_the_engine_alone_reads_one_commit(tmp_path: Path) -> None:
    with fake_hub({GOOD: DEMO}, failures=[]) as hub:
        assert run(GENERATE, hub.url, tmp_path, GOOD) == [4]
        assert hub.requested.count("main") == 1
        assert set(hub.requested) == {"main", COMMIT}


def test_a_folder_has_no_revisions(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    name = at_revision(str(tmp_path / "model"), "main")
    for read in (local_folder, load_tokenizer, resolve_checkpoint, commit_of):
        with pytest.raises(ValueError, match="remove the revision"):
            read(name)
    assert commit_of(str(tmp_path)) == commit_of(str(tmp_path / "later")) == ""
    assert commit_of(f"org/name@{COMMIT}") == COMMIT  # no request to the Hub
    with pytest.raises(ValueError, match="speculative_revision in --speculative-config"):
        EngineConfig.of(model="org/name", speculative_revision="main")


def test_a_failing_hub_is_retried_and_a_refusal_is_not(tmp_path: Path) -> None:
    weightless = tmp_path / "weightless"
    weightless.mkdir()
    (weightless / "config.json").write_bytes((DEMO / "config.json").read_bytes())
    home = tmp_path / "home"
    with fake_hub({GOOD: DEMO, WEIGHTLESS: weightless}, failures=[500, 503]) as hub:
        [printed] = run(START, hub.url, home, GOOD, MISSPELT, WEIGHTLESS)
        assert not hub.failures
    first, second, last = printed[GOOD]["reports"]
    assert ("500" in first, "503" in second, last) == (True, True, None)
    assert printed[GOOD]["error"] == ""
    assert printed[MISSPELT]["reports"] == printed[WEIGHTLESS]["reports"] == []
    assert (
        f"{MISSPELT} is not a local folder and cannot be downloaded" in printed[MISSPELT]["error"]
    )
    assert "no *.safetensors" in printed[WEIGHTLESS]["error"]

    # Nothing listens there any more, so the cache is used.
    [printed] = run(START, hub.url, home, GOOD)
    assert printed == {GOOD: {"error": "", "reports": []}}
