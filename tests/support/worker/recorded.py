"""Records the calls of a scheduler and its clock's values, and replays them."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from worker.core.scheduler import Scheduler
from worker.core.scheduler.speculation_gate import SpeculationGate

_RECORDED = ("add", "provide", "abort", "set_admission", "schedule", "apply", "take_report")


class Call(NamedTuple):
    """One call of the scheduler."""

    name: str
    arguments: bytes
    """Pickled at the time of the call."""
    answer: bytes
    """The returned value, encoded."""


class Recording:
    """Calls of one scheduler in order, and its clock's values."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.readings: list[float] = []
        self._is_inside = False

    def clock(self) -> float:
        """Clock for the engine; records the values that the scheduler reads."""
        now = time.monotonic()
        if self._is_inside:
            self.readings.append(now)
        return now

    def attach(self, scheduler: Scheduler) -> None:
        """Starts recording a scheduler that has not been called yet."""
        for name in _RECORDED:
            setattr(scheduler, name, self._recorded(name, getattr(scheduler, name)))

    def replay(self, recorded: Scheduler) -> int:
        """Repeats the calls on another scheduler, which must return the same. Returns the number of
        steps."""
        gate = recorded.steps.speculation
        readings = iter(self.readings)
        again = Scheduler(
            recorded.config,
            lambda: next(readings),
            None
            if gate is None
            else SpeculationGate(gate.config, recorded.config, stops_itself=gate.stops_itself),
        )
        num_steps = 0
        for number, call in enumerate(self.calls):
            positional, named = pickle.loads(call.arguments)
            answer = getattr(again, call.name)(*positional, **named)
            assert msgspec.msgpack.encode(answer) == call.answer, (
                f"call {number}, {call.name}, returned something else:\n{answer}"
            )
            num_steps += call.name == "apply"
        assert next(readings, None) is None, "the clock was read less often"
        return num_steps

    def _recorded(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*positional: Any, **named: Any) -> Any:
            arguments = pickle.dumps((positional, named))
            self._is_inside = True
            answer = method(*positional, **named)
            self._is_inside = False
            self.calls.append(Call(name, arguments, msgspec.msgpack.encode(answer)))
            return answer

        return recorded
