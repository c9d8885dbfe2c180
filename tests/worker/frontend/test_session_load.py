"""Load of all gateways' live agent sessions, as reported by a worker."""

from __future__ import annotations

from worker.frontend.session_load import SessionLoad
from worker.protocol.messages import LoadSnapshot, Submit, TokenDelta
from worker.protocol.working_sets import SessionUse


class Load:
    def __init__(self) -> None:
        self.now = 0.0
        self.sessions = SessionLoad(lambda: self.now)

    def begin(self, name: str, key: int, tokens: int, gateway: str = "g0") -> None:
        use = SessionUse(key, tokens, shared_key=7, shared_tokens=50, live_s=10.0)
        self.sessions.begin([Submit(request_id=name, gateway_id=gateway, prompt=b"", session=use)])

    def finish(self, name: str) -> None:
        self.sessions.apply({"g0": [TokenDelta(name, 0, [], "stop")]})

    @property
    def tokens(self) -> int:
        return self.sessions.added_to(LoadSnapshot(session_tokens=1)).session_tokens


def test_sessions_of_all_gateways_count_while_they_are_live() -> None:
    load = Load()
    load.begin("a", 1, 100)
    load.begin("b", 2, 200, gateway="g1")
    assert load.tokens == 100 + 200 + 50, "the shared prefix counts once"
    load.finish("a")
    load.now = 9.0
    assert load.tokens == 350
    load.begin("a2", 1, 150)
    load.now = 30.0
    assert load.tokens == 400, "it came back in time, and has grown"
    load.finish("a2")
    load.sessions.end("b")
    load.now = 41.0
    assert load.tokens == 0


def test_a_request_that_is_sent_again_counts_once() -> None:
    load = Load()
    load.begin("a", 1, 100)
    load.begin("a", 1, 120)
    assert load.tokens == 170
    load.finish("a")
    load.finish("a")
    load.now = 11.0
    assert load.tokens == 0


def test_loads_without_sessions_are_left_alone() -> None:
    before = LoadSnapshot(num_running=3)
    sessions = SessionLoad()
    sessions.begin([Submit(request_id="r", gateway_id="g", prompt=b"")])
    sessions.apply({"g": [TokenDelta("r", 0, [], "stop")]})
    assert sessions.added_to(before) is before
