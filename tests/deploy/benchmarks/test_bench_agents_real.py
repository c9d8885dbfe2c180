"""Coding agents on real fleets: recorded sessions, variants, figures and checks."""

from __future__ import annotations

import json
from itertools import cycle, islice
from pathlib import Path
from typing import get_args

import pytest

from cluster.bench.agents.loop import TurnRecord
from cluster.bench.client import Record
from cluster.bench.turns import Turns
from cluster.config import find_demo_model
from deploy.benchmarks.cli import main
from deploy.benchmarks.routing.agents import load as agent_load
from deploy.benchmarks.routing.agents.load import Pace
from deploy.benchmarks.routing.agents.recorded import recorded_agents
from deploy.benchmarks.routing.paced import Vocabulary, load
from deploy.benchmarks.routing.real.agent_options import RealAgentOptions
from deploy.benchmarks.routing.real.agents import (
    AgentFigures,
    WordSpace,
    drive_agents,
    figures,
    order_checks,
    ratios_to_default,
    table,
)
from deploy.benchmarks.routing.workload import DEFAULT_COSTS
from router.fleet.session_gate import PLAIN_TOKENS
from tests.support.cluster.openai_backend import Backend


def test_recorded_sessions_follow_the_seed_and_only_the_first_ones_are_partly_done() -> None:
    first, again = (list(islice(recorded_agents(3.0, 5, 12), 60)) for _ in range(2))
    assert first == again
    assert {session.num_system for session in first} == {5062}
    assert any(session.num_past for session in first[:12])
    assert all(session.num_past < len(session.turns) for session in first)
    assert not any(session.num_past for session in first[12:])
    turns = [turn for session in first for turn in session.turns]
    assert 0.7 < sum(turn.num_call > 0 for turn in turns) / len(turns) < 0.9
    assert all(session.turns[0].num_call == 0 for session in first)


def test_compression_divides_lengths_and_gaps() -> None:
    whole, half = (next(recorded_agents(factor, 5, 0)) for factor in (1.0, 2.0))
    for one, other in zip(whole.turns, half.turns, strict=True):
        assert other.num_appended == max(1, round(one.num_appended / 2))
        assert other.gap_s == pytest.approx(one.gap_s / 2)


def test_gaps_of_people_are_those_of_one_recorded_session_in_order() -> None:
    unattended, people = (next(recorded_agents(2.0, 5, 0, pace)) for pace in get_args(Pace))
    assert len(people.turns) == len(unattended.turns)
    gaps = [round(2.0 * turn.gap_s, 6) for turn in people.turns]
    recorded = [
        [round(min(max(gap, 0.1), 300.0), 6) for gap in session]
        for session in json.loads(
            Path(agent_load.__file__).with_name("recorded_gaps.json").read_text()
        )["gaps"]
    ]
    assert any(
        gaps == list(islice(cycle(session[first:] + session[:first]), len(gaps)))
        for session in recorded
        for first in range(len(session))
    )


def test_prompts_are_long_enough_for_the_gate() -> None:
    options = RealAgentOptions()
    session = next(recorded_agents(options.compression, 1, 0))
    assert session.num_system > PLAIN_TOKENS


def test_texts_have_exactly_the_tokens_that_are_asked_for() -> None:
    tokenizer = load(find_demo_model())
    space = WordSpace(Vocabulary(tokenizer))
    ids = space.vocabulary[:300].tolist()
    assert len(tokenizer.encode(space.as_text(ids)).ids) == 300


def test_variants_differ_in_gate_and_host_tier() -> None:
    found = {
        name: (one.max_wait_s, one.shape.num_host_pages)
        for name in ("default", "host", "gate", "gate-host")
        for one in [RealAgentOptions(variant=name, compression=3.0)]
    }
    pages = 90_000 // 16
    assert found == {
        "default": (0.0, 0),
        "host": (0.0, pages),
        "gate": (200.0, 0),
        "gate-host": (200.0, pages),
    }
    costs = RealAgentOptions(compression=3.0).shape.costs
    assert costs.prefill_token == DEFAULT_COSTS.prefill_token
    # A prompt of a third of the length takes a third of the time.
    whole, third = DEFAULT_COSTS.prefill(90_000), costs.prefill(30_000)
    assert third == pytest.approx(whole / 3, rel=1e-3)


def turn(ended_at: float, ttft: float, *, is_first: bool = False, error: str = "") -> TurnRecord:
    record = Record(index=0, prompt_len=100, requested_len=1, ttft=ttft, cached_tokens=80)
    record.error = error
    return TurnRecord(is_first=is_first, record=record, ended_at=ended_at)


def test_figures_are_of_the_second_half() -> None:
    ended = [
        turn(10.0, 50.0),
        turn(31.0, 2.0),
        turn(40.0, 4.0),
        turn(45.0, 9.0, is_first=True),
        turn(50.0, 0.0, error="lost"),
    ]
    one = figures(ended, 5.0, 60.0)
    assert one.turns_per_minute == pytest.approx(6.0)
    assert one.hit_rate == pytest.approx(0.8)
    assert (one.p50_running, one.longest_wait) == (pytest.approx(3.0), 9.0)
    assert (one.num_turns, one.num_failed) == (3, 1)
    assert figures(ended, 70.0, 60.0).longest_wait == 70.0


def fleet(turns_per_minute: float) -> AgentFigures:
    return AgentFigures(turns_per_minute, 0.5, 1.0, 2.0, 3.0, 4.0, 10, 0)


def test_checks_are_of_the_order_and_of_the_best_variant() -> None:
    turns = Turns(
        {
            "default": [fleet(20.0), fleet(10.0), fleet(10.0)],
            "gate": [fleet(30.0), fleet(30.0), fleet(40.0)],
            "gate-host": [fleet(28.0), fleet(24.0), fleet(80.0)],
        }
    )
    checks = {check.name: (check.value, check.holds) for check in order_checks(turns, "s")}
    assert checks == {
        "s_gate_of_default": (pytest.approx(3.0), True),
        "s_gate_host_of_gate": (pytest.approx(28.0 / 30.0), False),
        "s_best_of_default": (pytest.approx(3.0), True),
    }
    row = table(turns)[0]
    assert (row["turns_per_minute"], row["turns"], row["failed"]) == (10.0, 30, 0)
    assert row["interval_low"] < 10.0 < 20.0 < row["interval_high"]
    gate, _ = ratios_to_default(turns)
    assert (gate["arm"], gate["ratios"]) == ("gate", [1.5, 3.0, 4.0])
    alone = Turns({"default": turns["default"]})
    assert order_checks(alone, "s") == ratios_to_default(alone) == []


async def test_sessions_are_sent_with_tools_and_their_results(backend: Backend) -> None:
    backend.pace_s = 0.001
    model = find_demo_model()
    options = RealAgentOptions(model=model, sessions=(3,), compression=300.0, window_s=0.4)
    ended, _ = await drive_agents(options, backend.url)
    assert len(ended) > 3
    assert not any(turn.record.error for turn in ended)
    sent = [body["messages"] for body in backend.bodies]
    assert all(body["tools"] for body in backend.bodies)
    assert len({messages[0]["content"] for messages in sent}) == 1
    roles = {message["role"] for messages in sent for message in messages}
    assert roles == {"system", "user", "assistant", "tool"}
    assert any(len(messages) > 2 for messages in sent[:3]), "some are partly done"


def test_options_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["router", "--agents", "--real", "--fleet", "pinned"]) == 2
    assert "choose from default, host, gate, gate-host" in capsys.readouterr().err
    with pytest.raises(ValueError, match="a single --sessions"):
        RealAgentOptions(variant="gate", sessions=(3, 6))
    with pytest.raises(ValueError, match="choose from unattended, people"):
        RealAgentOptions(gaps=("recorded",))
    with pytest.raises(ValueError, match="--window-s must be greater than 0"):
        RealAgentOptions(window_s=0.0)
    with pytest.raises(ValueError, match="--compression"):
        RealAgentOptions(compression=0.5)
