"""The gate for agent sessions: bounded waits, oldest first, no plain traffic, exact sums."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from router.fleet import Fleet, PromptBlocks, SessionGate, Visit
from router.fleet.session_gaps import FIRST_LIVE_S, MAX_LIVE_S, MIN_LIVE_S, GapHistogram
from router.fleet.session_gate import CAPACITY, EXCEED_S
from router.fleet.sessions import MAX_SUB_AGENTS, Sessions
from tests.support.effort import cases
from tests.support.router.fleet_states import fleet_of
from worker.frontend.session_load import SessionLoad
from worker.protocol.messages import LoadSnapshot, Submit

MAX_WAIT_S = 100.0
PLAIN_TOKENS = 20
WORKER_IDS = st.sampled_from(["w0", "w1"])
CACHE = 1000
"""Tokens of a worker's cache: 250 pages of 4."""


@pytest.fixture(autouse=True)
def small_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.fleet.session_gate.PLAIN_TOKENS", PLAIN_TOKENS)


class Desk:
    """A gate in front of idle workers, with a clock."""

    def __init__(self, *worker_ids: str) -> None:
        self.now = 1.0
        self.fleet: Fleet = fleet_of(*worker_ids)
        self.gate = SessionGate(self.fleet, lambda: self.now, MAX_WAIT_S)
        self.num_requests = 0

    def prompt(self, session: str, num_tokens: int, agent: int = 0) -> PromptBlocks:
        """The first tokens of an agent's endless context; its number is in all of them."""
        tokens = np.arange(num_tokens, dtype="<i4") + 1_000 * agent
        prompt = PromptBlocks(tokens.tobytes(), session=session)
        prompt.has_tools = True
        return prompt

    def arrive(self, session: str, num_tokens: int, agent: int = 0) -> Visit:
        visit = self.gate.arrive(self.prompt(session, num_tokens, agent))
        assert visit is not None
        self.gate.admit()
        return visit

    def place(self, visit: Visit, session: str, num_tokens: int, agent: int = 0) -> str:
        self.num_requests += 1
        name = f"r{self.num_requests}"
        prompt = self.prompt(session, num_tokens, agent)
        choice = self.fleet.reserve(name, prompt, visit.excluded)
        assert choice is not None
        self.fleet.release_booking(choice.worker_id, name)
        use = self.gate.placed(visit, choice)
        assert (use is not None) == visit.context.counts
        assert use is None or use.tokens + use.shared_tokens >= num_tokens
        return choice.worker_id

    def report(self, worker_id: str, tokens: int, num_running: int = 0) -> None:
        load = LoadSnapshot(num_running=num_running, session_tokens=tokens)
        self.gate.reported(worker_id, load)

    def run(self, session: str, num_tokens: int, agent: int = 0) -> Visit:
        visit = self.arrive(session, num_tokens, agent)
        assert visit.admitted
        self.place(visit, session, num_tokens, agent)
        return visit


def test_a_session_waits_until_there_is_room_beside_the_live_ones() -> None:
    desk = Desk("w0")
    first = desk.run("a", 600, 1)
    second = desk.arrive("b", 400, 2)
    assert not second.admitted
    desk.gate.end(first)
    desk.now += FIRST_LIVE_S - 1.0
    desk.gate.admit()
    assert not second.admitted, "the first may come back"
    desk.now += 2.0
    assert desk.gate.admit() == [second]
    assert second.wait_s == pytest.approx(FIRST_LIVE_S + 1.0)


def test_the_list_has_waiting_sessions_then_the_largest_and_is_bounded() -> None:
    desk = Desk("w0")
    small = desk.run("secret id", 100, 1)
    desk.run("b", 500, 2)
    desk.now += 2.0
    desk.gate.end(small)
    desk.arrive("c", 400, 3)
    desk.now += 3.0
    found = desk.gate.listing(2)
    assert (found.num_waiting, found.num_live) == (1, 2)
    waiting, largest = found.sessions
    assert (waiting.state, waiting.state_s, waiting.worker) == ("waiting", 3.0, "")
    assert (largest.state, largest.state_s, largest.tokens) == ("running", 0.0, 500)
    assert (largest.age_s, largest.turns, largest.worker) == (5.0, 1, "w0")
    idle = desk.gate.listing(10).sessions[2]
    assert (idle.state, idle.state_s) == ("idle", 3.0)
    assert "secret" not in str(found)
    desk.now += MAX_LIVE_S
    assert [row.tokens for row in desk.gate.listing(10).sessions[1:]] == [500]


def test_sub_agents_are_listed_with_the_digest_of_their_session() -> None:
    desk = Desk("w0")
    desk.run("a", 100, 1)
    desk.run("a", 100, 2)
    desk.run("", 100, 3)
    digests = [row.session for row in desk.gate.listing(10).sessions]
    assert len(digests) == 3
    assert len(set(digests)) == 2


def test_a_live_session_passes_those_that_wait() -> None:
    desk = Desk("w0")
    desk.gate.end(desk.run("a", 600, 1))
    waiting = desk.arrive("b", 400, 2)
    assert desk.arrive("a", 700, 1).admitted
    assert not waiting.admitted


@pytest.mark.parametrize("gap_s", [MAX_LIVE_S / 2, 2 * MAX_LIVE_S])
def test_sessions_with_long_gaps_wait_only_once(gap_s: float) -> None:
    desk = Desk("w0")
    for _ in range(20):
        desk.gate.end(desk.run("a", 100, 1))
        desk.now += gap_s
    desk.now += 2 * MAX_LIVE_S
    desk.run("busy", 900, 4)
    assert not desk.arrive("b", 400, 2).admitted
    assert desk.arrive("a", 200, 1).admitted == (gap_s > MAX_LIVE_S)


def test_a_sub_agent_has_the_age_of_its_session() -> None:
    desk = Desk("w0")
    first = desk.run("a", 900, 1)
    desk.now += 1.0
    young, child = desk.arrive("b", 400, 2), desk.arrive("a", 400, 3)
    desk.gate.end(first)
    desk.now += MAX_LIVE_S
    assert desk.gate.admit() == [child, young]


def test_without_an_id_the_prompt_identifies_the_session() -> None:
    desk = Desk("w0")
    desk.gate.end(desk.run("", 600, 1))
    assert not desk.arrive("", 400, 2).admitted
    assert desk.arrive("", 700, 1).admitted


def test_the_oldest_session_is_first_and_none_is_overtaken() -> None:
    desk = Desk("w0")
    desk.gate.end(desk.run("old", 300, 1))
    desk.now += MAX_LIVE_S
    busy = desk.run("busy", 900, 2)
    young = desk.arrive("young", 500, 3)
    small = desk.arrive("small", 100, 4)
    child = desk.arrive("old", 400, 5)
    assert desk.gate.num_waiting == 3
    desk.gate.end(busy)
    desk.now += MAX_LIVE_S
    assert desk.gate.admit() == [child, young]
    assert not small.admitted
    assert 400 + 500 < CAPACITY * CACHE < 400 + 500 + 100


def test_no_wait_exceeds_its_bound() -> None:
    desk = Desk("w0")
    desk.run("a", 900, 1)
    visits = [desk.arrive(f"b{n}", 900, 2 + n) for n in range(3)]
    desk.now += MAX_WAIT_S
    assert desk.gate.admit() == visits
    assert [visit.wait_s for visit in visits] == [MAX_WAIT_S] * 3


def test_an_overdue_request_takes_the_place_of_those_admitted_first() -> None:
    desk = Desk("w0")
    first, second = desk.run("a", 300, 1), desk.run("b", 500, 2)
    overdue = desk.arrive("c", 400, 3)
    desk.now += MAX_WAIT_S / 2
    assert not desk.arrive("d", 100, 4).admitted
    desk.now += MAX_WAIT_S / 2
    desk.gate.end(second)
    assert desk.gate.admit() == [overdue]
    assert desk.gate.own_tokens == {"w0": 500 + 400}
    desk.place(overdue, "c", 400, 3)
    assert desk.arrive("b", 500, 2).admitted, "it was admitted after the first one"
    desk.gate.end(first)
    waiting = desk.arrive("a", 350, 1)
    assert not waiting.admitted
    desk.now += MAX_WAIT_S
    desk.gate.admit()
    assert waiting.admitted
    assert sum(desk.gate.own_tokens.values()) < CAPACITY * CACHE


def test_workers_and_other_gateways_no_longer_count_displaced_sessions() -> None:
    desk, worker = Desk("w0"), SessionLoad(lambda: 0.0)
    uses = []
    for agent, tokens in enumerate((600, 400), 1):
        visit = desk.arrive(f"s{agent}", tokens, agent)
        desk.now += MAX_WAIT_S
        desk.gate.admit()
        prompt = desk.prompt(f"s{agent}", tokens, agent)
        choice = desk.fleet.reserve(f"r{agent}", prompt, visit.excluded)
        assert choice is not None
        uses.append(desk.gate.placed(visit, choice))
        worker.begin([Submit(request_id=f"r{agent}", gateway_id="g", prompt=b"", session=uses[-1])])
    assert uses[1] is not None
    assert uses[0] is not None
    assert uses[1].displaced == (uses[0].key,)
    assert worker.added_to(LoadSnapshot()).session_tokens == 400 == desk.gate.own_tokens["w0"]


def test_a_retry_does_not_displace_sessions_that_were_admitted_again() -> None:
    desk = Desk("w0")
    first = desk.run("a", 600, 1)
    overdue = desk.arrive("b", 400, 2)
    desk.now += MAX_WAIT_S
    desk.gate.admit()
    choice = desk.fleet.reserve("r", desk.prompt("b", 400, 2), overdue.excluded)
    assert choice is not None
    use = desk.gate.placed(overdue, choice)
    assert use is not None
    assert use.displaced == (first.context.key,)
    desk.gate.end(first)
    again = desk.arrive("a", 600, 1)
    desk.now += MAX_WAIT_S
    assert desk.gate.admit() == [again]
    retried = desk.gate.placed(overdue, choice)
    assert retried is not None
    assert retried.displaced == ()


def test_sessions_with_long_gaps_are_not_displaced() -> None:
    desk = Desk("w0")
    for _ in range(20):
        desk.gate.end(desk.run("a", 600, 1))
        desk.now += 2 * MAX_LIVE_S
    desk.run("a", 600, 1)
    overdue = desk.arrive("b", 400, 2)
    desk.now += MAX_WAIT_S
    assert desk.gate.admit() == [overdue]
    assert overdue.displaced == ()


def test_full_workers_that_are_often_idle_accept_one_session_after_another() -> None:
    desk = Desk("w0")
    desk.report("w0", 0)
    desk.now += 100.0
    desk.run("a", 900, 1)
    second, third = desk.arrive("b", 900, 2), desk.arrive("c", 900, 3)
    assert not second.admitted, "an idle worker says nothing while nobody waits"
    desk.report("w0", 0)
    desk.now += 20.0
    assert desk.gate.admit() == [second]
    desk.now += EXCEED_S
    assert desk.gate.admit() == [third]
    desk.now += 30.0  # without an idle moment
    assert not desk.arrive("d", 900, 4).admitted


def test_sessions_of_other_gateways_count() -> None:
    desk = Desk("w0", "w1")
    desk.report("w0", 900, 1)
    first = desk.arrive("a", 200, 1)
    assert first.excluded == ("w0",)
    assert desk.place(first, "a", 200, 1) == "w1"
    desk.report("w1", 900, 1)
    assert not desk.arrive("b", 200, 2).admitted
    desk.report("w0", 700, 1)
    assert len(desk.gate.admit()) == 1


def test_two_gateways_admit_no_more_than_one_would() -> None:
    desks = Desk("w0"), Desk("w0")
    worker = SessionLoad(lambda: desks[0].now)
    places: list[bool] = []
    for number in range(6):
        desk = desks[number % 2]
        desk.report("w0", worker.added_to(LoadSnapshot()).session_tokens, 1)
        visit = desk.arrive("", 300, number)
        places.append(visit.admitted)
        if visit.admitted:
            choice = desk.fleet.reserve(f"r{number}", desk.prompt("", 300, number))
            assert choice is not None
            use = desk.gate.placed(visit, choice)
            submit = Submit(request_id=f"r{number}", gateway_id="g", prompt=b"", session=use)
            worker.begin([submit])
    assert places == [True] * 3 + [False] * 3


def test_a_prefix_that_sessions_share_counts_once() -> None:
    desk = Desk("w0")
    for agent in range(4):
        tokens = np.concatenate([np.arange(200), np.arange(50) + 1_000 * (agent + 1)])
        prompt = PromptBlocks(tokens.astype("<i4").tobytes(), session=f"s{agent}")
        prompt.has_tools = True
        visit = desk.gate.arrive(prompt)
        assert visit is not None
        desk.gate.admit()
        choice = desk.fleet.reserve(f"r{agent}", prompt)
        assert choice is not None
        desk.gate.placed(visit, choice)
    # The first one found nothing cached: its whole prompt is its own.
    assert desk.gate.own_tokens == {"w0": 250 + 200 + 3 * 50}


@pytest.mark.parametrize(
    ("num_tokens", "has_tools", "session", "is_plain"),
    [
        (PLAIN_TOKENS - 1, False, "", True),
        (PLAIN_TOKENS - 1, False, "s", True),
        (PLAIN_TOKENS - 1, True, "", True),
        (PLAIN_TOKENS, False, "", True),
        (PLAIN_TOKENS, True, "", False),
        (PLAIN_TOKENS, False, "s", False),
    ],
)
def test_plain_chats_are_neither_delayed_nor_counted(
    num_tokens: int, has_tools: bool, session: str, is_plain: bool
) -> None:
    desk = Desk("w0")
    desk.run("a", 900, 1)
    prompt = desk.prompt(session, num_tokens, 9)
    prompt.has_tools = has_tools
    visit = desk.gate.arrive(prompt)
    assert (visit is None or visit.admitted) == is_plain
    if is_plain and visit is not None:
        before = desk.gate.own_tokens
        choice = desk.fleet.reserve("r", prompt)
        assert choice is not None
        assert desk.gate.placed(visit, choice) is None
        assert desk.gate.own_tokens == before


def test_requests_with_tools_that_never_come_back_stop_counting() -> None:
    desk = Desk("w0")
    for agent in range(30):
        desk.gate.end(desk.run("", 100, agent))
        desk.now += MAX_LIVE_S
    desk.run("", 900, 50)
    single = desk.arrive("", 900, 51)
    assert single.admitted
    assert not single.context.counts
    desk.place(single, "", 900, 51)
    desk.gate.end(single)
    again = desk.arrive("", 910, 51)
    assert again.admitted
    assert again.context.counts, "it is a session after all"


def test_single_long_prompts_do_not_make_agents_look_like_them() -> None:
    desk = Desk("w0")
    for number in range(100):
        prompt = desk.prompt("", 200, number)
        prompt.has_tools = False
        visit = desk.gate.arrive(prompt)
        assert visit is not None
        desk.gate.end(visit)
    assert desk.arrive("", 200, 200).context.counts


def test_a_long_prompt_counts_only_once_it_has_proved_to_be_a_session() -> None:
    desk = Desk("w0")
    desk.run("a", 900, 1)
    for number in range(2):
        prompt = desk.prompt("", 100 + 50 * number, 9)
        prompt.has_tools = False
        visit = desk.gate.arrive(prompt)
        assert visit is not None
        assert visit.admitted
        assert visit.context.counts == (number == 1)
        desk.gate.end(visit)


def test_the_number_of_contexts_is_bounded() -> None:
    sessions = Sessions(max_contexts=8)
    desk = Desk("w0")
    key = desk.fleet.block_keys()[0]
    for number in range(40):
        hashes = desk.prompt("", 64, number).hashes(key)
        context = sessions.add(f"s{number}" if number % 2 else "", hashes, 0.0)
        sessions.extend(context, hashes, 64)
        sessions.dropped()
        sessions.check_invariants()
    assert len(sessions) == 8


def test_an_id_that_all_users_send_does_not_make_them_old() -> None:
    desk = Desk("w0")
    visits = []
    for agent in range(MAX_SUB_AGENTS + 1):
        desk.now += 1.0
        visits.append(desk.arrive("app", 20, agent))
    assert {visit.context.born for visit in visits[:-1]} == {2.0}
    assert visits[-1].context.born == desk.now


@pytest.mark.parametrize(
    ("gaps", "seconds"),
    [([], FIRST_LIVE_S), ([0.3] * 20, MIN_LIVE_S), ([400.0] * 20, MAX_LIVE_S), ([20.0] * 20, 22.6)],
)
def test_the_live_time_is_a_quantile_of_the_gaps(gaps: list[float], seconds: float) -> None:
    shared, own = GapHistogram(), GapHistogram()
    for gap in gaps:
        shared.add(gap)
    assert shared.live_s(shared) == pytest.approx(seconds, rel=0.01)
    assert own.live_s(shared) == pytest.approx(seconds, rel=0.01)


class GateMachine(RuleBasedStateMachine):
    """Agents come, run, end, are dropped; workers report, fail and come back."""

    @initialize()
    def begin(self) -> None:
        self.desk = Desk("w0", "w1")
        self.sizes = dict.fromkeys(range(8), 100)
        self.open: list[tuple[Visit, str, int, int]] = []
        self.num_arrived = self.num_over = 0

    @rule(agent=st.integers(0, 7), has_id=st.booleans(), more=st.integers(0, 300))
    def arrive(self, agent: int, has_id: bool, more: int) -> None:
        self.sizes[agent] = min(self.sizes[agent] + more, CACHE)
        session = f"s{agent // 2}" if has_id else ""
        visit = self.desk.gate.arrive(self.desk.prompt(session, self.sizes[agent], agent))
        assert visit is not None
        self.open.append((visit, session, self.sizes[agent], agent))
        self.num_arrived += 1
        self.admit()

    @rule(seconds=st.sampled_from([0.1, 5.0, 20.0, 60.0]))
    def wait(self, seconds: float) -> None:
        self.desk.now += seconds
        self.admit()

    def admit(self) -> None:
        before = [visit for visit, *_ in self.open if not visit.admitted]
        admitted = self.desk.gate.admit()
        now = self.desk.now
        assert all(now - v.arrived_at < MAX_WAIT_S for v in before if not v.admitted)
        for visit in admitted:
            # By room: all that are older have been admitted, too.
            if visit.sets is not None and visit.wait_s < MAX_WAIT_S:
                assert all(v.admitted for v in before if v.order < visit.order)

    @rule(place=st.integers(0, 30))
    def place(self, place: int) -> None:
        ready = [one for one in self.open if one[0].admitted]
        if ready:
            self.desk.place(*ready[place % len(ready)])

    @rule(place=st.integers(0, 30), leaves=st.booleans())
    def finish(self, place: int, leaves: bool) -> None:
        if not self.open:
            return
        visit, *_ = self.open.pop(place % len(self.open))
        over: list[bool] = []
        visit.on_over = lambda: over.append(True)
        waited = not visit.admitted
        (self.desk.gate.leave if leaves else self.desk.gate.end)(visit)
        self.desk.gate.end(visit)
        assert bool(over) == waited
        self.num_over += 1

    @rule(
        worker_id=st.sampled_from(["w0", "w1"]), tokens=st.integers(0, 1200), busy=st.integers(0, 1)
    )
    def report(self, worker_id: str, tokens: int, busy: int) -> None:
        self.desk.report(worker_id, tokens, busy)

    @rule(worker_id=WORKER_IDS)
    def fail(self, worker_id: str) -> None:
        self.desk.gate.lose(worker_id)

    @invariant()
    def sums_are_right_and_no_request_is_lost(self) -> None:
        if not hasattr(self, "desk"):
            return
        self.desk.gate.check_invariants()
        waiting = sum(not visit.admitted for visit, *_ in self.open)
        assert self.desk.gate.num_waiting == waiting
        assert self.num_arrived == self.num_over + len(self.open)
        found = self.desk.gate.listing(3)
        assert len(found.sessions) == min(3, found.num_waiting + found.num_live)

    def teardown(self) -> None:
        if not hasattr(self, "desk"):
            return
        self.desk.now += MAX_WAIT_S + 1e-6  # sums of waits are rounded
        self.admit()
        assert not self.desk.gate.num_waiting
        for visit, *_ in self.open:
            self.desk.gate.end(visit)
        self.desk.now += MAX_LIVE_S
        self.desk.gate.admit()
        self.desk.gate.expire()
        assert not any(self.desk.gate.own_tokens.values())


GateMachine.TestCase.settings = settings(
    max_examples=cases(30), stateful_step_count=30, deadline=None
)
TestGate = GateMachine.TestCase
