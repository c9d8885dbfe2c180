"""Plans with masked rows: when their masks follow, and ended rows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.support.worker.inventing_executor import make_core, run, submit
from worker.core.engine import EngineCore
from worker.core.grammar.state import GrammarProblem
from worker.protocol.messages import Abort

ONES = b"\xff\xff\xff"
NO_MASK = b"\xff" * 16  # of all tokens


class CountingGrammar:
    """Its mask is the number of its tokens; complete after `length` of them; rejects token number
    `refuse_at`; free text follows token number `free_from`."""

    def __init__(
        self, length: int = 99, refuse_at: int = -1, slow_from: int = 99, free_from: int = 99
    ) -> None:
        self.taken: list[int] = []
        self._slow_from = slow_from
        self._free_from = free_from
        self._length = length
        self._refuse_at = refuse_at

    @property
    def mask(self) -> bytes:
        return bytes([255, 255, 255, len(self.taken)])

    @property
    def is_slow(self) -> bool:
        return len(self.taken) >= self._slow_from

    @property
    def is_complete(self) -> bool:
        return len(self.taken) >= self._length

    @property
    def may_draft(self) -> bool:
        return False

    @property
    def is_free(self) -> bool:
        return len(self.taken) >= self._free_from

    def walk(self, drafts: Sequence[int]) -> list[bytes]:
        raise AssertionError("nothing is drafted here")

    def advance(self, token_id: int) -> GrammarProblem | None:
        self.taken.append(token_id)
        refused = GrammarProblem("refused", 400)
        return refused if len(self.taken) == self._refuse_at else None


def add(
    core: EngineCore,
    request_id: str,
    grammar: CountingGrammar | GrammarProblem,
    max_tokens: int = 3,
) -> None:
    one = submit(request_id, max_tokens=max_tokens)
    one.grammar = "key"
    core.scheduler.add(one)  # its grammar is simulated here
    core.guide(request_id, 0, grammar)


@pytest.mark.parametrize(
    ("depth", "start"),
    [
        (0, ["launch 1", "masks 1", "result 1", "launch 2", "masks 2", "result 2"]),
        # Step 1 computes the prompt: nothing is queued after it.
        (1, ["launch 1", "masks 1", "result 1", "launch 2", "masks 2", "launch 3", "result 2"]),
    ],
)
def test_masks_follow_the_plan_once_the_step_before_is_applied(
    depth: int, start: list[str]
) -> None:
    core, executor = make_core(depth)
    add(core, "a", CountingGrammar())
    assert run(core) == {"a": [1, 2, 3]}
    assert executor.journal[: len(start)] == start
    assert executor.masks == [ONES + b"\0", ONES + b"\1", ONES + b"\2"]
    if depth == 1:
        assert executor.journal[7] == "masks 3"


@pytest.mark.parametrize("depth", [0, 1])
def test_only_rows_with_a_grammar_are_masked_and_only_their_steps_wait(depth: int) -> None:
    core, executor = make_core(depth)
    core.add(submit("plain", max_tokens=6))
    add(core, "a", CountingGrammar(), max_tokens=2)
    tokens = run(core)
    assert [len(tokens[name]) for name in ("plain", "a")] == [6, 2]
    assert [plan.masked for plan in executor.plans] == [[1], [1], [], [], [], []]
    assert executor.masks == [ONES + b"\0", ONES + b"\1"]


@pytest.mark.parametrize("depth", [0, 1])
def test_free_text_is_not_masked(depth: int) -> None:
    """From the first step that is launched after the token before it."""
    core, executor = make_core(depth)
    grammar = CountingGrammar(free_from=2)
    add(core, "a", grammar, max_tokens=6)
    assert run(core) == {"a": [1, 2, 3, 4, 5, 6]}
    in_flight = [[0]] * depth
    assert [plan.masked for plan in executor.plans] == [[0], [0], *in_flight, *[[]] * (4 - depth)]
    assert executor.masks == [ONES + b"\0", ONES + b"\1", *[NO_MASK] * depth]
    assert grammar.taken == [1, 2]
    assert not core._guided


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("free_from", [0, 2])
def test_free_text_may_follow_a_slow_token_or_a_resumption(depth: int, free_from: int) -> None:
    core, executor = make_core(depth)
    add(core, "other", CountingGrammar(), max_tokens=1)
    run(core)
    executor.plans.clear()
    add(core, "a", CountingGrammar(slow_from=1, free_from=free_from), max_tokens=4)
    while core.has_work() or core.grammars.num_due:
        if not core.has_work():
            core.take_grammars(wait=True)
        core.step()
    masked = [bool(plan.masked) for plan in executor.plans]
    assert sum(masked) == (0 if free_from == 0 else 2 + depth)
    assert not core._guided
    core.close()


@pytest.mark.parametrize("depth", [0, 1])
def test_the_end_of_the_grammar_ends_the_request(depth: int) -> None:
    core, executor = make_core(depth)
    grammar = CountingGrammar(length=2)
    add(core, "a", grammar, max_tokens=9)
    core.add(submit("plain", max_tokens=5))
    reasons = {}
    while core.has_work():
        for delta in core.step().deltas.get("g", ()):
            reasons[delta.request_id] = delta.finish_reason, delta.stop_reason
        core.scheduler.check_invariants()
    assert reasons == {"a": ("stop", None), "plain": ("length", None)}
    assert len(grammar.taken) == 2, "the token of the row after its end is dropped"
    assert len(executor.masks) == sum(bool(plan.masked) for plan in executor.plans) == 2 + depth


@pytest.mark.parametrize("depth", [0, 1])
def test_a_rejected_token_ends_the_request_with_an_error(depth: int) -> None:
    core, _ = make_core(depth)
    add(core, "a", CountingGrammar(refuse_at=2), max_tokens=9)
    add(core, "b", GrammarProblem("no such grammar", 500))
    core.add(submit("plain", max_tokens=5))
    last = {}
    while core.has_work():
        for delta in core.step().deltas.get("g", ()):
            status = None if delta.rejection is None else delta.rejection.status
            last[delta.request_id] = delta.finish_reason, delta.error, status
    assert last == {
        "a": ("error", "refused", 400),
        "b": ("error", "no such grammar", None),
        "plain": ("length", None, None),
    }, "only problems that the client can fix are reported as 400"


def test_a_request_waits_for_its_grammar_without_holding_others() -> None:
    core, executor = make_core(1)
    held = submit("held")
    held.grammar = "key"
    core.scheduler.add(held)
    assert not core.has_work(), "the loop may sleep"
    core.add(submit("plain"))
    assert [*run(core)] == ["plain"]
    core.guide("held", 0, CountingGrammar())
    assert [*run(core)] == ["held"]
    core.add(submit("gone"))
    again = submit("aborted")
    again.grammar = "key"
    core.scheduler.add(again)
    core.abort(Abort(request_id="aborted"))
    core.guide("aborted", 0, CountingGrammar())
    run(core)
    assert len(executor.masks) == 3


@pytest.mark.parametrize("depth", [0, 1])
def test_with_a_complete_grammar_nothing_is_sampled(depth: int) -> None:
    core, executor = make_core(depth)
    add(core, "a", CountingGrammar(length=0))
    assert run(core) == {"a": []}
    assert not executor.plans


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(
    ("grammar", "tokens", "reason"),
    [
        (CountingGrammar(slow_from=2), 6, "length"),
        (CountingGrammar(length=4, slow_from=2), 4, "stop"),
        (CountingGrammar(refuse_at=4, slow_from=2), 4, "error"),
    ],
    ids=["length", "stop", "error"],
)
def test_no_request_waits_for_a_slow_grammar(
    depth: int, grammar: CountingGrammar, tokens: int, reason: str
) -> None:
    core, executor = make_core(depth)
    grammar.taken.clear()
    add(core, "slow", grammar, max_tokens=6)
    core.add(submit("plain", max_tokens=5))
    drawn: dict[str, list[int]] = {}
    ends = {}
    while core.has_work() or core.grammars.num_due:
        if not core.has_work():
            core.take_grammars(wait=True)
        for delta in core.step().deltas.get("g", ()):
            drawn.setdefault(delta.request_id, []).extend(delta.token_ids)
            ends[delta.request_id] = delta.finish_reason
        core.scheduler.check_invariants()
    assert ends == {"slow": reason, "plain": "length"}
    assert len(drawn["slow"]) == tokens
    assert grammar.taken == drawn["slow"][: len(grammar.taken)]
    assert len(grammar.taken) >= tokens - 1
    assert len(executor.masks) == sum(bool(plan.masked) for plan in executor.plans)
    load = core.step().load
    assert load.num_free_pages == load.num_total_pages
    core.close()


def test_a_matcher_that_arrives_again_is_dropped() -> None:
    core, _ = make_core(0)
    grammar, again = CountingGrammar(), CountingGrammar()
    add(core, "a", grammar, max_tokens=4)
    core.step()
    core.guide("a", 0, again)
    core.guide("a", 0, GrammarProblem("too late", 500))
    core.guide("nobody", 0, again)
    assert run(core)["a"][-1] == 4
    assert (grammar.taken, again.taken) == ([1, 2, 3], [])
    assert not core._guided
