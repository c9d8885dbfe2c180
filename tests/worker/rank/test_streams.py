"""No buffer of a step is written while another stream or the host may still use it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.support.engines.race_detector import Detector, Race
from worker.rank.streams import NUM_SLOTS, DeviceStreams, StepSlot

NUM_STEPS = 9


@pytest.fixture
def detector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Detector]:
    with Detector(monkeypatch) as found:
        yield found


class Steps:
    """A runner's use of slots, on shared buffers."""

    def __init__(self, detector: Detector) -> None:
        self._detector = detector
        self.streams = DeviceStreams(torch.device("cpu"))
        self._columns = torch.zeros(40000, dtype=torch.uint8)
        self._tokens = torch.zeros(4, dtype=torch.uint8)

    def launch(self, number: int, *, awaits_fetches: bool = True) -> tuple[StepSlot, torch.Tensor]:
        """Returns the slot, and its results on the host once it has completed."""
        with torch.cuda.stream(self.streams.compute):
            slot = self.streams.take()
            # Sometimes more than a buffer holds, and two uploads in one step.
            sizes = (40000 * (1 + number % 3), 16)[: 1 + number % 2]
            for size in sizes:
                staged = slot.upload(size, partial(self._fill, number))
            self._columns[: min(size, 40000)].copy_(staged[:40000])
            if awaits_fetches:
                self.streams.await_fetches()
            self._tokens.copy_(self._columns[:4])
            slot.finish()
            fetched = slot.fetch(self._tokens)
            slot.close()
        return slot, fetched

    def _fill(self, number: int, target: npt.NDArray[np.uint8]) -> None:
        self._detector.by_host(torch.from_numpy(target), write=True)
        target[:] = number

    def read(self, slot: StepSlot, fetched: torch.Tensor) -> list[int]:
        slot.wait()
        self._detector.by_host(fetched, write=False)
        values: list[int] = fetched.tolist()
        return values


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_steps_in_flight_do_not_race(detector: Detector, depth: int) -> None:
    steps = Steps(detector)
    in_flight, found = [], []
    for number in range(NUM_STEPS):
        in_flight.append(steps.launch(number))
        if len(in_flight) > depth:
            found.append(steps.read(*in_flight.pop(0)))
    found += [steps.read(*step) for step in in_flight]
    assert found == [[number] * 4 for number in range(NUM_STEPS)]


def test_slots_take_turns_and_wait_for_their_last_step(
    detector: Detector, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal: list[StepSlot] = []
    streams = DeviceStreams(torch.device("cpu"))
    monkeypatch.setattr(StepSlot, "wait", lambda slot: journal.append(slot))
    taken = [streams.take() for _ in range(5)]
    assert len({*map(id, taken[:NUM_SLOTS])}) == NUM_SLOTS
    assert taken[NUM_SLOTS:] == taken[: 5 - NUM_SLOTS]
    assert journal == taken


def test_a_slot_is_not_filled_before_its_last_step_is_over(
    detector: Detector, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(detector)
    monkeypatch.setattr(StepSlot, "wait", lambda _slot: False)
    for number in range(NUM_SLOTS):
        steps.launch(number)
    with pytest.raises(Race, match="host writes what stream"):
        steps.launch(0)


def test_tokens_stay_until_they_are_fetched(detector: Detector) -> None:
    steps = Steps(detector)
    steps.launch(0)
    with pytest.raises(Race, match="writes what stream"):
        steps.launch(1, awaits_fetches=False)


def test_results_are_not_read_before_they_are_here(detector: Detector) -> None:
    slot, fetched = Steps(detector).launch(0)
    with pytest.raises(Race, match="host reads what stream"):
        detector.by_host(fetched, write=False)
    slot.wait()
    detector.by_host(fetched, write=False)


def test_inputs_are_not_read_before_they_are_up(
    detector: Detector, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(detector)
    monkeypatch.setattr(type(steps.streams.compute), "wait_event", lambda *_: None)
    with pytest.raises(Race, match="reads what stream"):
        steps.launch(0)
