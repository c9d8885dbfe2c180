"""Checks of the clients' cases, and comparison of streaming with non-streaming responses."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.campaigns import checks
from tests.campaigns.conformance.cases import Endpoint, Outcome, try_cases
from tests.campaigns.conformance.document import Report, report_of
from tests.campaigns.conformance.main import ConformanceOptions, judge
from tests.campaigns.conformance.twins import (
    KINDS,
    difference,
    drawn,
    gathered_choices,
    gathered_message,
    received_choices,
    received_message,
)

GOOD = Outcome("openai: chat", "passed")
REPORT = Report(num_cases=2000, accepted=5, failures={}, errors=[])


def failing(*outcomes: Outcome, document: Report | None = None) -> set[str]:
    return {c.name for c in judge(outcomes, document, min_cases=2000) if not c.holds}


def test_each_fault_counts() -> None:
    assert failing(GOOD) == set()
    assert failing(GOOD, Outcome("openai: a", "failed", "why")) == {"openai_failed"}
    skipped = Outcome("openai: a", "skipped", "a reason")
    assert failing(GOOD, skipped) == set()
    assert failing(skipped) == {"openai_passed"}
    assert failing(GOOD, skipped._replace(text="")) == {"openai_skipped_without_a_reason"}


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"num_cases": 1999}, "document_cases"),
        ({"accepted": 0}, "document_accepted"),
        ({"failures": {"Server error": 1}}, "document_failed"),
        ({"errors": ["Schema Loading Error: 1"]}, "document_errors"),
    ],
)
def test_the_document_holds_or_not(changed: dict[str, Any], name: str) -> None:
    assert failing(GOOD, document=REPORT) == set()
    assert failing(GOOD, document=REPORT._replace(**changed)) == {name}


def test_a_run_that_was_cut_off_is_an_error() -> None:
    found = {
        "complete": True,
        "valid_rates": {"POST /a": {"fuzzing": {"accepted": 2}, "coverage": {"accepted": 3}}},
        "test_cases": {"generated": 9},
        "failures": [{"title": "Server error", "count": 2}],
        "errors": [],
    }
    assert report_of(found) == Report(9, 5, {"Server error": 2}, [])
    assert report_of({**found, "complete": False}).errors


def test_a_case_that_raises_has_failed() -> None:
    def case(endpoint: Endpoint) -> None:
        assert endpoint.model == "other"

    endpoint = Endpoint("http://127.0.0.1:1", "demo", "")
    found = list(try_cases("x", {"a": case}, {"b": "why"}, endpoint))
    assert [(one.name, one.verdict) for one in found] == [("x: a", "failed"), ("x: b", "skipped")]
    [passed] = try_cases("x", {"a": case}, {}, endpoint._replace(model="other"))
    assert passed.verdict == "passed"


def test_all_kinds_are_drawn_and_alike_for_a_seed() -> None:
    one, other = ([drawn(random.Random(5), kind) for kind in KINDS] for _ in range(2))
    assert one == other
    assert all(body["max_tokens"] for _, body in one)


CALL = {"name": "f", "arguments": '{"a": 1}'}
WHOLE = {
    "usage": {"completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 0}},
    "choices": [
        {
            "index": 0,
            "message": {"content": "ab", "reasoning": "hm", "tool_calls": [{"function": CALL}]},
            "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -1.0}]},
            "finish_reason": "tool_calls",
            "stop_reason": None,
        }
    ],
}
DELTAS: list[dict[str, Any]] = [
    {"role": "assistant", "content": ""},
    {"reasoning": "hm"},
    {"content": "ab"},
    {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '{"a": 1}'}}]},
]


def chunks() -> list[dict[str, Any]]:
    stream_chunks: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in DELTAS
    ]
    for chunk, logprob in zip(stream_chunks[1:3], (-0.5, -1.00001), strict=True):
        chunk["choices"][0]["logprobs"] = {"content": [{"logprob": logprob}]}
    last = {"index": 0, "delta": {}, "finish_reason": "tool_calls", "stop_reason": None}
    usage = {"completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 16}}
    return [*stream_chunks, {"choices": [last]}, {"choices": [], "usage": usage}]


def test_a_stream_that_adds_up_is_no_difference() -> None:
    assert difference(received_choices(WHOLE), gathered_choices(chunks())) is None


@pytest.mark.parametrize("lost", range(1, 7))
def test_whatever_a_stream_loses_is_a_difference(lost: int) -> None:
    stream_chunks = chunks()
    if lost == 3:  # nothing defines what is called
        stream_chunks[3]["choices"][0]["delta"]["tool_calls"][0]["function"]["name"] = "g"
    else:
        del stream_chunks[lost]
    assert difference(received_choices(WHOLE), gathered_choices(stream_chunks)) is not None


def test_messages_are_gathered() -> None:
    call = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1}}
    whole = {
        "content": [{"type": "text", "text": "ab"}, call],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {"output_tokens": 3},
    }
    events: list[dict[str, Any]] = [
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"text": "ab"}},
        {"type": "content_block_start", "index": 1, "content_block": {**call, "input": {}}},
        {"type": "content_block_delta", "index": 1, "delta": {"partial_json": '{"a"'}},
        {"type": "content_block_delta", "index": 1, "delta": {"partial_json": ": 1}"}},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "tool_use", "stop_sequence": None},
            "usage": {"output_tokens": 3},
        },
    ]
    assert difference(received_message(whole), gathered_message(events)) is None
    assert (
        difference(received_message(whole), gathered_message(events[:4] + events[5:])) is not None
    )


def test_parts_are_checked() -> None:
    with pytest.raises(ValueError, match="--parts"):
        ConformanceOptions(parts=("everything",))


def test_vectors_run_in_a_separate_process(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[Sequence[str]] = []
    order = []

    def measurement(command: Sequence[str], name: str) -> dict[str, Any]:
        commands.append(command)
        order.append("apart")
        return {"passed": {"cohere": 2}, "faults": ["late"], "document": None, "checks": [2]}

    def run(options: ConformanceOptions) -> dict[str, Any]:
        assert options.parts in (("twins", "document"), ("vectors",), ("twins",))
        order.append("here")
        return {"passed": {"twins": 1}, "faults": [], "document": {"cases": 3}, "checks": [1]}

    monkeypatch.setattr(checks, "run_measurement", measurement)
    options = ConformanceOptions(parts=("twins", "document", "vectors"))
    assert checks.run_with_part_apart(run, options, "vectors", ["a.module", "--clients", "b"]) == {
        "passed": {"twins": 1, "cohere": 2},
        "faults": ["late"],
        "document": {"cases": 3},
        "checks": [1, 2],
    }
    assert order == ["apart", "here"], "fleets change the environment"
    flags = ["-m", "a.module", "--clients", "b", "--json", "--parts", "vectors"]
    assert [list(command[1:]) for command in commands] == [flags]
    for parts in (("vectors",), ("twins",)):
        checks.run_with_part_apart(run, replace(options, parts=parts), "vectors", ["a.module"])
    assert len(commands) == 1
