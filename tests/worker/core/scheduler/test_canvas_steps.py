"""Requests of a model with canvases get the same tokens, however steps and pages are shared."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from worker.config import DllmConfig
from worker.core.scheduler import Scheduler, SchedulerConfig
from worker.core.scheduler.block_policy import BlockPolicy
from worker.plan.plan import BlockOutcome, BlockRow, Plan, StepResult
from worker.protocol.messages import Submit
from worker.protocol.page_groups import PageGroups
from worker.protocol.sampling import SamplingParams

CANVAS, PAGE, WINDOW = 8, 4, 10
GROUPS = PageGroups(num_full=1, num_window=1, window=WINDOW)
VOCAB = 50


def canvas_after(tokens: Sequence[int]) -> tuple[list[int], int]:
    """Tokens and rounds of the canvas after these tokens."""
    rng = random.Random(hash(tuple(tokens)))
    return [rng.randrange(2, VOCAB) for _ in range(CANVAS)], rng.randrange(1, 14)


def content(tokens: Sequence[int]) -> int:
    """Key of the last of these tokens."""
    return hash((1, *tokens))


@dataclass
class Slot:
    tokens: list[int]
    pages: list[dict[int, int]]
    """Pages by index, for each group."""
    start: int = -1
    rounds: int = 0


@dataclass
class Device:
    """Pages with a key per cell: each row checks those that it attends to."""

    fdfo: bool
    cache: dict[tuple[int, int], int] = field(default_factory=dict)
    slots: dict[int, Slot] = field(default_factory=dict)
    num_forwards: int = 0
    num_mixed: int = 0
    """Steps with rows of known tokens beside those of canvases."""

    def run(self, plan: Plan) -> StepResult:
        for admit in plan.admits:
            tokens = np.frombuffer(admit.token_ids, dtype="<i4").tolist()
            self.slots[admit.slot] = Slot(tokens, [{}, {}])
        for write in plan.page_writes:
            pages = self.slots[write.slot].pages[write.group]
            pages.update(enumerate(write.page_ids, write.start))
        canvases = []
        for row in plan.rows:
            length = row.length
            if isinstance(row, BlockRow):
                length -= CANVAS
                canvases.append(BlockRow(row.slot, row.start + length, CANVAS))
            if length:
                self._compute(self.slots[row.slot], row.start, length)
        self.num_mixed += 0 < len(canvases) < len(plan.rows)
        return self._run_rounds(plan, canvases)

    def _compute(self, slot: Slot, start: int, length: int) -> None:
        self._check(slot, start)
        for position in range(start, start + length):
            self._write(slot, position, content(slot.tokens[: position + 1]))
        assert start + length <= len(slot.tokens)

    def _run_rounds(self, plan: Plan, rows: Sequence[BlockRow]) -> StepResult:
        done: dict[int, list[int]] = {}
        num_rounds = dict.fromkeys((row.slot for row in rows), 0)
        num_forwards = int(not rows)
        while len(done) < len(rows):
            num_forwards += 1
            for row in rows:
                if row.slot in done:
                    continue
                slot = self.slots[row.slot]
                assert (row.start, row.length) == (len(slot.tokens), CANVAS)
                if slot.start != row.start:
                    slot.start, slot.rounds = row.start, 0
                self._check(slot, row.start)
                slot.rounds += 1
                num_rounds[row.slot] += 1
                for position in range(row.start, row.start + CANVAS):
                    self._write(slot, position, hash((slot.rounds, position)))
                tokens, most = canvas_after(slot.tokens)
                if slot.rounds == most:
                    done[row.slot] = tokens
            if self.fdfo and (done or num_forwards == plan.max_rounds):
                break
        for number, tokens in done.items():
            self.slots[number].tokens += tokens
        self.num_forwards += num_forwards
        outcomes = [
            BlockOutcome(
                num_tokens=CANVAS * (row.slot in done),
                is_committed=False,
                num_rounds=num_rounds[row.slot],
                num_forwards=num_rounds[row.slot],
            )
            for row in rows
        ]
        token_ids = [token for row in rows for token in done.get(row.slot, ())]
        return StepResult(plan.seq, token_ids, 1.0, blocks=outcomes, num_forwards=num_forwards)

    def _check(self, slot: Slot, end: int) -> None:
        """Keys that a row attends to which begins at `end`."""
        for group, first in enumerate((0, max(0, end + 1 - WINDOW))):
            for position in range(first, end):
                page = slot.pages[group][position // PAGE]
                own = self.cache.get((page, position % PAGE))
                assert own == content(slot.tokens[: position + 1]), (group, position)

    def _write(self, slot: Slot, position: int, key: int) -> None:
        for group in range(2):
            self.cache[slot.pages[group][position // PAGE], position % PAGE] = key


class Engine:
    def __init__(
        self, *, num_pages: int, fdfo: bool = True, tokens: int = 24, max_num_seqs: int = 4
    ) -> None:
        self.device = Device(fdfo)
        self.outputs: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=tokens,
            max_model_len=200,
            page_size=PAGE,
            num_pages=num_pages + 1,
            eos_token_ids=(1,),
            page_groups=GROUPS,
            blocks=BlockPolicy.of(DllmConfig(fdfo=fdfo), CANVAS, has_canvases=True),
        )
        self.scheduler = Scheduler(config, lambda: 0.0)

    def add(self, name: str, prompt: list[int], max_tokens: int, num_resumed: int = 0) -> None:
        self.outputs[name] = []
        self.scheduler.add(
            Submit(
                request_id=name,
                gateway_id="g",
                prompt=np.asarray(prompt, dtype="<i4").tobytes(),
                sampling=SamplingParams(max_tokens=max_tokens),
                num_resumed=num_resumed,
            )
        )

    def step(self) -> bool:
        plan = self.scheduler.schedule()
        if plan is not None:
            self.scheduler.apply(self.device.run(plan))
        self.scheduler.check_invariants()
        for delta in self.scheduler.take_report().deltas.get("g", ()):
            self.outputs[delta.request_id] += delta.token_ids
            if delta.finish_reason is not None:
                self.reasons[delta.request_id] = delta.finish_reason
        return self.scheduler.has_work()


def answer(prompt: list[int], max_tokens: int) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens += canvas_after(tokens)[0]
    return tokens[len(prompt) :][:max_tokens]


def test_random_requests() -> None:
    preempted = sum(number_of_preemptions(seed) for seed in range(16))
    assert preempted > 4, "pages were not scarce"


def number_of_preemptions(seed: int) -> int:
    """Runs random requests, and checks their outputs."""
    rng = random.Random(seed)
    num_pages = rng.choice([28, 28, 60, 200])
    engine = Engine(num_pages=num_pages, fdfo=seed % 3 > 0, tokens=rng.choice([8, 24]))
    shared = [rng.randrange(2, VOCAB) for _ in range(24)]
    requests: dict[str, tuple[list[int], int]] = {}
    for number in range(14):
        prompt = shared[: rng.randrange(25)] + [rng.randrange(2, VOCAB)] * rng.randrange(1, 9)
        requests[str(number)] = prompt, rng.randrange(1, 28)
        engine.add(str(number), *requests[str(number)])
        for _ in range(rng.randrange(4)):
            engine.step()
    while engine.step():
        pass
    for name, (prompt, max_tokens) in requests.items():
        assert engine.outputs[name] == answer(prompt, max_tokens)
        assert engine.reasons[name] == "length"
    return engine.scheduler.take_report().load.num_preemptions


def test_a_cached_prompt_has_no_known_tokens_to_compute() -> None:
    engine = Engine(num_pages=100)
    prompt = list(range(2, 2 + 3 * PAGE))
    for name in ("first", "second"):
        engine.add(name, prompt, CANVAS)
        before = engine.device.num_forwards
        while engine.step():
            pass
        assert engine.outputs[name] == answer(prompt, CANVAS)
        assert engine.device.num_forwards - before == canvas_after(prompt)[1]


@pytest.mark.parametrize("max_num_seqs", [4, 16])
def test_first_done_first_out_takes_fewer_rounds(max_num_seqs: int) -> None:
    found = []
    for fdfo in (True, False):
        tokens = max_num_seqs * CANVAS
        engine = Engine(num_pages=1000, fdfo=fdfo, tokens=tokens, max_num_seqs=max_num_seqs)
        for number in range(4 * max_num_seqs):
            engine.add(str(number), [2 + number % 40] * (5 + number // 40), 3 * CANVAS)
        while engine.step():
            pass
        found.append(engine.device.num_forwards)
        assert engine.device.num_mixed > 0 or not fdfo
    assert found[1] > 1.3 * found[0]


def test_synchronous_steps_leave_no_canvas_out() -> None:
    """The rounds of a canvas that is left out would follow those of the others."""
    engine = Engine(num_pages=1000, fdfo=False, tokens=4 * CANVAS)
    for number in range(16):
        engine.add(str(number), [2 + number] * 5, 3 * CANVAS)
    num_canvases = []
    while plan := engine.scheduler.schedule():
        if any(isinstance(row, BlockRow) for row in plan.rows):
            num_canvases.append(len(plan.rows))
        engine.scheduler.apply(engine.device.run(plan))
        engine.scheduler.take_report()
    assert set(num_canvases) == {4}


def test_prompts_progress_beside_requests_that_generate() -> None:
    """Each step leaves tokens to a prompt under way: canvases after finished ones wait for it."""
    budget, num_generating = 8, 7
    engine = Engine(num_pages=2000, tokens=budget * CANVAS, max_num_seqs=num_generating + 1)
    for number in range(num_generating):
        engine.add(str(number), [2 + number], 18 * CANVAS)
    for _ in range(4):
        engine.step()
    before = engine.device.num_forwards
    engine.add("long", list(range(2, 2 + 18 * CANVAS)), CANVAS)
    while not engine.outputs["long"]:
        engine.step()
    assert engine.device.num_forwards - before < 40
