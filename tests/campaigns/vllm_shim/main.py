"""`make check-vllm-tests VLLM_TESTS=FOLDER`: runs vLLM's own endpoint tests against a fleet.

FOLDER is a checkout of vLLM, or its unpacked source distribution (`pip download --no-binary vllm`).
Tests of chats, completions, tools, reasoning, responses, tokens and Anthropic's messages run
unmodified, with a stand-in for the server that they start. Failed or skipped tests need a
documented reason (tests/campaigns/vllm_shim/reasons.py).
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from cluster.bench.report import Check, Result, at_least, checks_json, exactly, note
from cluster.config import ServeConfig, find_demo_model
from cluster.launch import LocalFleet
from deploy.models.tokenizer import TOOL_TEMPLATE
from tests.campaigns.checks import check_main, serve_config
from tests.campaigns.vllm_shim.groups import FOLDERS, GROUPS, Group
from tests.campaigns.vllm_shim.reasons import LEFT_OUT, MODEL, REASONS, Reason, reason_for
from tests.campaigns.vllm_shim.stage import Outcome, files_with_tests, lay_out, run
from tests.support.checkpoints.adapters import write_adapter

THINKS = "{%- set enable_thinking = enable_thinking | default(true) %}\n"
"""Prepended to a chat template."""
TEMPLATE = "chat_template.jinja"
_KV_CACHE_TOKENS = 2**15


@dataclass(frozen=True, kw_only=True, slots=True)
class VllmTestsOptions:
    """Tests to run."""

    checkout: str
    """Folder of vLLM that contains the folder `tests`."""
    files: str = "*"
    """Pattern of the files to run, such as *responses*."""

    def __post_init__(self) -> None:
        if not (Path(self.checkout) / "tests").is_dir():
            raise ValueError(
                f"{self.checkout!r} has no folder tests: give one with vLLM's source as --checkout"
            )


def run_vllm_tests(options: VllmTestsOptions) -> Result:
    """Starts a fleet for each group of files, and runs the files."""
    checkout = Path(options.checkout).resolve()
    known = {file for group in GROUPS for file in group.files}
    wordless = [
        file
        for file in files_with_tests(checkout, FOLDERS)
        if file not in known and reason_for(file, LEFT_OUT) is None
    ]
    outcomes: list[Outcome] = []
    # One fleet per process.
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        for group in (_part(group, options.files) for group in GROUPS):
            if group.files:
                outcomes += pool.submit(_run_group, group, checkout).result()
    return {
        **summary(outcomes),
        "files_without_reason": wordless,
        "checks": checks_json(judge(outcomes, wordless)),
    }


def summary(outcomes: Sequence[Outcome]) -> Result:
    """Number of tests by outcome, and tests that failed without a documented reason."""
    reasons = [(o, reason_for(o.test, REASONS)) for o in outcomes]
    return {
        "tests": dict(Counter(_class(outcome, reason) for outcome, reason in reasons)),
        "failed": {o.test: o.detail for o, r in reasons if o.outcome == "failed" and r is None},
        "needless_reasons": [r.pattern for r in _needless(outcomes)],
    }


def judge(outcomes: Sequence[Outcome], wordless: Sequence[str]) -> list[Check]:
    """Checks of the outcomes.

    Args:
        outcomes: outcomes of all tests that ran.
        wordless: files that did not run and have no documented reason.
    """
    failed = [o for o in outcomes if o.outcome == "failed"]
    return [
        at_least("passed", sum(o.outcome == "passed" for o in outcomes), "tests", 1),
        exactly(
            "failed_without_reason",
            sum(reason_for(o.test, REASONS) is None for o in failed),
            "tests",
            0,
        ),
        exactly("needless_reasons", len(_needless(outcomes)), "reasons", 0),
        exactly("files_without_reason", len(wordless), "files", 0),
    ]


def _class(outcome: Outcome, reason: Reason | None) -> str:
    if outcome.outcome != "failed":
        return outcome.outcome
    return "failed" if reason is None else f"failed, with a reason: {reason.kind}"


def _needless(outcomes: Sequence[Outcome]) -> list[Reason]:
    """Reasons whose tests all pass, except for tests that may pass by chance."""
    found: dict[Reason, set[str]] = {}
    for outcome in outcomes:
        if (reason := reason_for(outcome.test, REASONS)) is not None:
            found.setdefault(reason, set()).add(outcome.outcome)
    return [r for r, seen in found.items() if r.kind != MODEL and seen == {"passed"}]


def _part(group: Group, pattern: str) -> Group:
    return replace(group, files=tuple(file for file in group.files if fnmatch(file, pattern)))


def _run_group(group: Group, checkout: Path) -> list[Outcome]:
    with tempfile.TemporaryDirectory() as directory:
        model, stage = Path(directory) / "model", Path(directory) / "stage"
        stage.mkdir()
        lay_out(checkout, FOLDERS, stage)
        with LocalFleet(_config(group, model), report=note) as fleet:
            note(f"{group.name}: {len(group.files)} files")
            found = run(stage, group.files, url=fleet.base_url, models=group.models, model=model)
    note(f"{group.name}: {summary(found)['tests']}")
    return found


def _config(group: Group, folder: Path) -> ServeConfig:
    """Configuration of a fleet with the demo model, a tool template, and lengths as in vLLM's
    tests."""
    folder.mkdir()
    for path in Path(find_demo_model()).iterdir():
        if path.name not in (TEMPLATE, "config.json"):
            (folder / path.name).symlink_to(path.resolve())
    (folder / TEMPLATE).write_text((THINKS if group.thinks else "") + TOOL_TEMPLATE)
    config = json.loads((Path(find_demo_model()) / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "max_position_embeddings": group.max_model_len})
    )
    served = serve_config(
        group.models[0],
        str(folder),
        kv_cache_tokens=_KV_CACHE_TOKENS,
        endpoint=group.endpoint,
        **_adapter_options(group, folder),
    )
    (spec,) = served.models
    fleet = replace(spec.fleet, served_model_aliases=group.models[1:])
    return replace(served, models=(replace(spec, fleet=fleet),))


def _adapter_options(group: Group, base: Path) -> dict[str, Any]:
    """Engine options for the group's adapters. Their scale is 0, so that they do not change what
    the demo model is capable of."""
    if not group.adapters:
        return {}
    folder = write_adapter(base, base / "adapter", 2, alpha_pattern={".*": 0})
    modules = tuple(f"{name}={folder}" for name in group.adapters)
    return {"enable_lora": True, "lora_modules": modules}


if __name__ == "__main__":
    sys.exit(check_main(run_vllm_tests, VllmTestsOptions))
