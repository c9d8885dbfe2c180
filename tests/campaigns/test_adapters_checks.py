"""History, operator and checks of `make check-adapters`."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.campaigns.chaos.adapter_history import (
    AdapterHistory,
    AdapterTally,
    Verdict,
    tally_adapters,
)
from tests.campaigns.chaos.adapter_operator import KINDS_OF_CHANGE, Operator
from tests.campaigns.chaos.adapters import PROMPTS, judge_adapters, list_adapter_requests
from tests.campaigns.chaos.answers import Answer
from tests.campaigns.chaos.campaign import Run
from tests.campaigns.chaos.client import Outcome
from tests.campaigns.chaos.faults import Fault
from tests.campaigns.chaos.options import ChaosOptions

REQUESTS = list_adapter_requests(["a"], 64)
KILLED = Fault(number=0, kind="kill-gateway", begin=12.0, ports=frozenset({4000}), recovered=18.0)


def answer(token: int) -> Answer:
    made = Answer()
    choice = {"index": 0, "text": str(token), "token_ids": [token], "finish_reason": "length"}
    made.take({"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 1}})
    return made


RIGHT = {(weights, n): answer(10 * int(weights) + n) for weights in "012" for n in range(PROMPTS)}


def changed() -> AdapterHistory:
    """`a` is loaded at 10 to 11 s, replaced at 20 to 21 s and unloaded at 30 to 31 s."""
    history = AdapterHistory({"a": None, "chaos": "0"})
    for at, weights in ((10.0, "1"), (20.0, "2"), (30.0, None)):
        history.begin("a", weights, at)
        history.confirm("a", at + 1.0)
    return history


def outcome(token: int = 10, **fields: Any) -> Outcome:
    """The first request for `a` from 15 s on, with the answer `token`."""
    request = next(request for request in REQUESTS if request.kind == "a")
    given = {"sent": 15.0, "begun": 15.0, "head_at": 15.5, "ended": 19.0, "end": "whole"}
    return Outcome(request=request, **{"answer": answer(token), **given, **fields})


def not_found(**fields: Any) -> Outcome:
    error = "HTTP 404: The model `a` does not exist."
    return outcome(end="error", status=404, **{"error": error, **fields})


def verdict(one: Outcome) -> str:
    counts = tally_adapters([one], [KILLED], changed(), RIGHT, PROMPTS)
    assert len(counts.wrong) == counts.counts["wrong"]
    assert len(counts.failed) == counts.counts["failed"]
    (found,) = counts.counts
    return found


def test_a_change_may_apply_from_its_request_to_its_confirmation() -> None:
    history = changed()
    assert history.possible("a", 0.0, 9.9) == [None]
    assert history.possible("a", 10.5, 10.6) == [None, "1"]
    assert history.possible("a", 12.0, 13.0) == ["1"]
    assert history.possible("a", 5.0, 25.0) == [None, "1", "2"]
    assert history.possible("a", 40.0, 41.0) == [None]
    assert history.possible("chaos", 0.0, 99.0) == ["0"]
    assert history.current("a") is None


def test_a_change_that_failed_may_or_may_not_have_applied() -> None:
    history = AdapterHistory({"a": "1"})
    history.begin("a", "2", 10.0)
    assert history.possible("a", 15.0, 16.0) == ["1", "2"]
    history.begin("a", None, 20.0)
    history.confirm("a", 21.0)
    assert history.possible("a", 22.0, 23.0) == [None]


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (outcome(10), "completed"),
        (outcome(20), "wrong"),
        (outcome(0), "wrong"),
        (outcome(11), "wrong"),
        (outcome(10, begun=21.5, head_at=22.0), "wrong"),
        (outcome(10, head_at=20.2), "completed"),
        (outcome(20, head_at=20.2), "completed"),
        (outcome(20, begun=32.0, head_at=32.5, ended=33.0), "wrong"),
        (not_found(), "failed"),
        (not_found(begun=30.5, head_at=30.6), "not_loaded"),
        (not_found(begun=32.0, head_at=32.1), "not_loaded"),
        (
            outcome(end="error", status=404, error="HTTP 404: no", begun=32.0, head_at=33.0),
            "failed",
        ),
        (outcome(end="broken", begun=11.5, head_at=11.6, port=4000), "cut"),
        (outcome(end="broken", begun=11.5, head_at=11.6, port=4001), "failed"),
        (outcome(end="error", status=500, error="HTTP 500: oh"), "failed"),
    ],
)
def test_verdicts(one: Outcome, expected: str) -> None:
    assert verdict(one) == expected


def test_a_wrong_answer_is_described_by_the_adapter_that_gave_it() -> None:
    late = [
        outcome(10, begun=21.5, head_at=22.0),
        outcome(99),
        outcome(20, begun=40.0, head_at=41.0),
    ]
    stale, unknown, unloaded = tally_adapters(late, [], changed(), RIGHT, PROMPTS).wrong
    assert "the answer of 1 instead of ['2'], which was right up to 2 s before" in stale
    assert "token ids differ" in unknown
    assert unloaded.endswith("the answer of 2 instead of [None]")


def test_requests_of_all_names_have_the_same_prompts() -> None:
    names = {request.kind for request in REQUESTS}
    assert names == {"chaos", "configured", "a"}
    bodies = {
        name: [{**json.loads(r.body), "model": ""} for r in REQUESTS if r.kind == name]
        for name in names
    }
    assert bodies["chaos"] == bodies["configured"] == bodies["a"]
    assert [request.index % PROMPTS for request in REQUESTS] == list(range(PROMPTS)) * 3


def broken(run: Run, operator: Operator, **fields: Any) -> list[str]:
    done: Counter[Verdict] = Counter({"completed": 1})
    counts = AdapterTally(counts=done, **fields.pop("tally", {}))
    checks = judge_adapters(run, counts, operator, fields.pop("differing", []))
    return [check.name for check in checks if not check.holds]


def test_each_problem_breaks_its_check() -> None:
    good = Run(faults=[KILLED])
    operator = Operator("", {}, changed(), 0)
    operator.changes.update(KINDS_OF_CHANGE)
    assert broken(good, operator) == []
    assert broken(good, operator, tally={"wrong": ["x"]}) == ["wrong"]
    assert broken(good, operator, tally={"failed": ["x"]}) == ["failed"]
    assert broken(good, operator, differing=["x"]) == ["differing_gateways"]
    assert broken(Run(), operator) == ["faults"]
    assert broken(Run(faults=[KILLED], left_over={"x": 1.0}), operator) == ["leaked"]
    operator.problems.append("x")
    del operator.changes["unload"]
    assert broken(good, operator) == ["unloads", "failed_changes"]


async def test_the_operator_retries_until_a_change_is_confirmed() -> None:
    # Of a load, an unload whose first attempt was lost, a load, and a replacement.
    replies = [503, 200, 502, 404, 200, 400]
    seen = []

    async def reply(request: web.Request) -> web.Response:
        seen.append((request.path, request.headers["authorization"], await request.json()))
        return web.Response(status=replies.pop(0))

    app = web.Application()
    app.router.add_post("/{path:.*}", reply)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    folders = {"1": Path("/1")}
    operator = Operator(f"http://{host}:{port}", folders, AdapterHistory({"a": None}), 0)
    with operator:
        for weights in ("1", None, "1", "1"):
            await asyncio.to_thread(operator.change, "a", weights)
    await runner.cleanup()
    assert operator.changes == Counter(load=2, unload=1)
    assert operator.retries == Counter({"HTTP 503": 1, "HTTP 502": 1})
    assert [problem.partition(": ")[0] for problem in operator.problems] == ["replace a"]
    assert {key for _, key, _ in seen} == {"Bearer operator"}
    load = {"lora_name": "a", "lora_path": "/1", "load_inplace": False}
    assert seen[0] == ("/v1/load_lora_adapter", "Bearer operator", load)
    assert seen[2][::2] == ("/v1/unload_lora_adapter", {"lora_name": "a"})
    assert seen[-1][2] == load | {"load_inplace": True}


def test_changes_are_random_but_keep_half_of_the_names_loaded() -> None:
    names = ["a", "b", "c", "d"]
    history = AdapterHistory(dict.fromkeys(names))
    operator = Operator("", dict.fromkeys("012", Path()), history, seed=1)
    kinds: Counter[str] = Counter()
    for at in range(300):
        name, weights = operator.next_change(names)
        before = history.current(name)
        assert weights != before
        kinds["unload" if weights is None else "load" if before is None else "replace"] += 1
        history.begin(name, weights, float(at))
        loaded = [one for one in names if history.current(one) is not None]
        assert at < 10 or len(loaded) >= 2
    assert min(kinds.values()) > 20


def test_adapters_exclude_other_modes() -> None:
    for other in ({"cancels": 5}, {"soak_s": 5.0}, {"diffusion_model": "x"}):
        with pytest.raises(ValueError, match="--adapters"):
            ChaosOptions(adapters=2, **other)
    with pytest.raises(ValueError, match="--adapters must be at least 2"):
        ChaosOptions(adapters=1)
