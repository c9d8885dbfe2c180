"""A worker group's checkpoint comes from a Hub that is not well, and a gateway's tokenizer too.

The Hub is a real server on loopback, the library that asks it is the real one, in a process of its
own: HF_ENDPOINT and HF_HOME are read when it is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.worker.fake_hub import fake_hub

DEMO = Path(__file__).parents[2] / "deploy" / "models" / "demo"
GOOD, MISSPELT, WEIGHTLESS = "org/demo", "org/dmeo", "org/weightless"

START = """
import asyncio, json, math, sys
from worker.engine.config import EngineConfig
from worker.group import _fetch_checkpoints
from worker.wire.retry import until_started
from worker.wire.tokenizer import load_tokenizer

def start(repository):
    config = EngineConfig(model=repository, device="cpu")
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
from worker.llm import LLM, SamplingParams
with LLM(sys.argv[1], device="cpu", cpu_threads=1, kv_cache_tokens=1024) as llm:
    sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    [output] = llm.generate(["What is 1 + 1?"], sampling)
    print(len(output.outputs[0].token_ids))
"""


def run(code: str, hub: str, home: Path, *repositories: str) -> list[Any]:
    environment = {**os.environ, "HF_ENDPOINT": hub, "HF_HOME": str(home)}
    environment.pop("HF_HUB_OFFLINE", None)
    command = [sys.executable, "-c", code, *repositories]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_hub_that_is_not_well_is_asked_again_and_one_that_says_no_is_not(tmp_path: Path) -> None:
    weightless = tmp_path / "weightless"
    weightless.mkdir()
    (weightless / "config.json").write_bytes((DEMO / "config.json").read_bytes())
    home = tmp_path / "home"
    with fake_hub({GOOD: DEMO, WEIGHTLESS: weightless}, failures=[500, 503]) as hub:
        told, num_tokens = run(START + GENERATE, hub.url, home, GOOD, MISSPELT, WEIGHTLESS)
        assert not hub.failures
    first, second, last = told[GOOD]["reports"]
    assert ("500" in first, "503" in second, last) == (True, True, None)
    assert (told[GOOD]["error"], num_tokens) == ("", 4)
    assert told[MISSPELT]["reports"] == told[WEIGHTLESS]["reports"] == []
    assert f"{MISSPELT} is no folder here and the Hub does not give it" in told[MISSPELT]["error"]
    assert "no *.safetensors" in told[WEIGHTLESS]["error"]

    # Nothing listens there any more: the cache does.
    [told] = run(START, hub.url, home, GOOD)
    assert told == {GOOD: {"error": "", "reports": []}}
