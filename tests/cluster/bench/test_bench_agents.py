"""Closed loops of agents: sessions, and a server with known answers."""

from __future__ import annotations

import json
from itertools import islice, repeat
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cluster.bench.agents.loop import SESSION_HEADER, AgentLoops
from cluster.bench.agents.sessions import (
    AgentSession,
    AgentTurn,
    random_sessions,
    recorded_sessions,
)
from cluster.bench.cli import main
from cluster.bench.client import open_session
from cluster.bench.prompts import PromptSpace
from cluster.bench.serve import CHAT

if TYPE_CHECKING:
    from tests.support.cluster.openai_backend import Backend

MODEL = "deploy/models/demo"
TRACE = """session_id,arrival_time,round_idx,prefix_len,input_len,output_len,tool_wait_after_ms
0,117,0,0,100,20,30
0,117,1,120,40,10,0
0,393,0,0,60,8,0
"""


def test_random_sessions_share_system_prompts_and_follow_the_seed() -> None:
    first, again = (list(islice(random_sessions(0.01, 7), 40)) for _ in range(2))
    assert first == again
    by_product = {session.product: session.num_system for session in first}
    assert len(by_product) == 3
    assert all(session.num_system == by_product[session.product] for session in first)
    assert all(15 <= len(session.turns) <= 40 for session in first)
    gaps = [turn.gap_s for session in first for turn in session.turns]
    assert 0.8 < sum(gap <= 1.0 for gap in gaps) / len(gaps) < 0.92
    assert max(gaps) <= 60.0


def test_recorded_sessions_begin_with_round_0(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(TRACE)
    two = AgentTurn(num_appended=30, num_output=4, gap_s=0.0)
    first, second, again = islice(recorded_sessions(file, 0.5), 3)
    assert first.turns == (
        AgentTurn(num_appended=50, num_output=10, gap_s=0.03),
        AgentTurn(num_appended=20, num_output=5, gap_s=0.0),
    )
    assert second.turns == (two,)
    assert again == first


@pytest.mark.parametrize("content", ["", "a,b\n1,2\n", TRACE.replace("100", "many")])
def test_other_files_are_rejected(tmp_path: Path, content: str) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(content)
    with pytest.raises(ValueError, match=r"--trace .*trace\.csv"):
        recorded_sessions(file, 1.0)


def test_contexts_grow_by_the_answers(
    backend: Backend, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    backend.pace_s = 0.001
    file = tmp_path / "trace.csv"
    file.write_text(TRACE)
    command = ["agents", "--base-url", backend.url, "--tokenizer", MODEL, "--trace", str(file)]
    limits = ["--sessions", "2", "--duration-s", "0.5", "--warmup-s", "0"]
    assert main([*command, *limits, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    [row] = result["rows"]
    assert row["turns"] >= 2
    assert row["failed"] == 0
    turns = [body["messages"] for body in backend.bodies]
    assert [message["role"] for message in turns[0]] == ["user"]
    second = next(messages for messages in turns if len(messages) == 3)
    assert [message["role"] for message in second] == ["user", "assistant", "user"]
    assert second[:1] in turns
    assert second[1]["content"] == 20 * 'a "b"\n'
    ids = [headers[SESSION_HEADER] for headers in backend.headers]
    assert len(set(ids)) < len(ids)


def test_a_tokenizer_is_required(backend: Backend, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["agents", "--base-url", backend.url]) == 2
    assert "set --tokenizer" in capsys.readouterr().err


def test_failed_requests_fail_the_benchmark(
    backend: Backend, capsys: pytest.CaptureFixture[str]
) -> None:
    backend.fail_with = "cut"
    command = ["agents", "--base-url", backend.url, "--tokenizer", MODEL, "--scale", "0.001"]
    assert main([*command, "--sessions", "1", "--duration-s", "0.5", "--warmup-s", "0"]) == 1
    assert len(backend.bodies) == 1  # the next one waits
    assert "requests failed" in capsys.readouterr().err


async def test_results_of_tools_follow_their_calls_and_past_turns_are_not_sent(
    backend: Backend,
) -> None:
    turns = [AgentTurn(num_appended=9, num_output=3, gap_s=0.0, num_call=n and 4) for n in range(4)]
    session = AgentSession(product=0, num_system=5, turns=tuple(turns), num_past=2)
    fields = {"model": "m", "stream": True}
    async with open_session({}) as http:
        loops = AgentLoops(
            http, backend.url + CHAT, fields, repeat(session), PromptSpace.load(MODEL), None, 0
        )
        await loops.run(1, 0.5)
    assert [turn.is_first for turn in loops.ended][:3] == [True, False, True]
    messages = backend.bodies[0]["messages"]
    roles = ["system", "user", "assistant", "tool", "assistant", "tool"]
    assert [message["role"] for message in messages] == roles
    for call, result in (messages[2:4], messages[4:6]):
        [made] = call["tool_calls"]
        assert made["id"] == result["tool_call_id"]
        assert json.loads(made["function"]["arguments"]).keys() == {"command"}
    assert backend.bodies[1]["messages"][:6] == [*messages[:6]]
