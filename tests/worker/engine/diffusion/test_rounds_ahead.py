"""Rounds that are launched before the outcome of the previous one is known: rows read no key that
was not committed, and tokens and rounds equal the oracle's."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch

from tests.support.engines.block_oracle import Answer, Logits, Terms, answer
from tests.support.engines.invented_model import MASK, VOCAB, InventedEngine, pure_logits
from worker.plan.plan import Plan, PlannedRow, Row, StepResult
from worker.protocol.diffusion import DiffusionParams, DllmAlgorithm
from worker.protocol.messages import StepReport
from worker.protocol.sampling import SamplingParams
from worker.rank.batch import Batch
from worker.rank.diffusion.ahead import BlocksAhead, RoundAhead
from worker.rank.diffusion.device_algorithms import ON_DEVICE

MAX_BLOCKS = 8
"""Blocks of the largest graph."""


class AheadEngine(InventedEngine):
    """Runs windows as rounds ahead, each with rows for `num_commits` blocks to commit."""

    def __init__(
        self, block_size: int, *, num_commits: int, early_exit: bool, **options: object
    ) -> None:
        disable = () if early_exit else ("early_exit",)
        super().__init__(block_size, depth=1, dllm_disable=disable, **options)  # type: ignore[arg-type]
        self._num_commits = num_commits
        self._launched: deque[tuple[Plan, RoundAhead | StepResult]] = deque()
        self._decoder._ahead = BlocksAhead(
            *(self._decoder.table, self._tables),
            score=self._score,
            max_blocks=lambda: MAX_BLOCKS,
            features=("early_exit", "report_at_once") if early_exit else ("report_at_once",),
        )
        self.num_rounds_ahead = 0

    def step(self) -> StepReport:
        plan = self.scheduler.schedule()
        if plan is not None:
            self._tables.apply(plan)
            step = self._decoder.prepare(plan)
            if step.ahead is not None:
                self._launch(step.ahead, step.plan.rows)
                self._launched.append((plan, step.ahead))
            else:
                indices = step.logits_indices
                hidden = None if indices is None else self._forward(step.plan, indices)
                results = self._decoder.run(step, hidden)
                self._launched.append((plan, results.add_to(StepResult(plan.seq, [], 1.0))))
        if self._launched and (plan is None or len(self._launched) > 1):
            done, outcome = self._launched.popleft()
            if isinstance(outcome, RoundAhead):
                outcome = outcome.add_to(StepResult(done.seq, [], 1.0))
            self.scheduler.apply(outcome)
        report = self.scheduler.take_report()
        self.scheduler.check_invariants()
        return report

    def _launch(self, ahead: RoundAhead, rows: list[Row]) -> None:
        num_windows, size = len(rows) - 1, self.block_size
        slots, starts = torch.zeros(2, num_windows + self._num_commits, dtype=torch.int64)
        ahead.place(cast("Batch", SimpleNamespace(staged={"slots": slots, "starts": starts})))
        placed = [
            PlannedRow(slot, start, size, 0)
            for slot, start in zip(slots.tolist(), starts.tolist(), strict=True)
        ]
        # As in a layer, keys of committed blocks are stored before any row reads them.
        for row in placed[num_windows:]:
            if row.slot != self._tables.dummy_slot:
                self._forward(Plan(0, [], [], [row]), torch.arange(size))
        hidden = torch.zeros(len(placed) * size, 1, dtype=torch.float64)
        for number, row in enumerate(placed[:num_windows]):
            if row.slot != self._tables.dummy_slot:
                found = self._forward(Plan(0, [], [], [row]), torch.arange(size))
                hidden[number * size : (number + 1) * size] = found
        ahead.run(hidden)
        self.num_rounds_ahead += 1


def make_terms(rng: np.random.Generator, algorithm: DllmAlgorithm) -> Terms:
    edits = algorithm == "JointThreshold"
    return Terms(
        algorithm=algorithm,
        threshold=float(rng.uniform(0.3, 0.9)),
        steps=None if edits or rng.random() < 0.5 else int(rng.integers(1, 5)),
        entropy_bound=float(rng.uniform(0.0, 4.0)),
        edit_threshold=float(rng.uniform(0.2, 0.7)),
        max_post_edit_steps=int(rng.integers(0, 4)),
    )


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(n, marks=pytest.mark.long) for n in range(2, 10))]
)
def test_tokens_and_rounds_equal_the_oracles(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size = (4, 8, 2)[seed % 3]
    engine = AheadEngine(
        size,
        num_commits=int(rng.integers(1, 4)),
        early_exit=seed % 2 == 0,
        num_pages=int(rng.integers(14, 40)),
        max_num_seqs=int(rng.integers(3, 9)),
    )
    expected: dict[str, Answer] = {}
    outputs: dict[str, list[int]] = {}
    num_rounds: dict[str, int] = {}
    waiting = list(range(14))
    while waiting or engine.scheduler.has_work():
        if waiting and rng.random() < 0.1:
            number = waiting.pop()
            terms = make_terms(rng, ON_DEVICE[number % len(ON_DEVICE)])
            prompt = rng.integers(0, VOCAB, int(rng.integers(1, 5 * size))).tolist()
            max_tokens, name = int(rng.integers(1, 6 * size)), str(number)
            logits = cast("Logits", pure_logits(size))
            expected[name] = answer(
                *(logits, prompt),
                block_size=size,
                mask=MASK,
                max_tokens=max_tokens,
                terms=terms,
                ends=(1,),
            )
            outputs[name] = []
            fields = {field: getattr(terms, field) for field in terms.__dataclass_fields__}
            params = DiffusionParams(**fields)
            sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, diffusion=params)
            engine.add(name, prompt, sampling)
        for delta in engine.step().deltas.get("g", ()):
            outputs[delta.request_id] += delta.token_ids
            num_rounds[delta.request_id] = delta.num_rounds
    assert outputs == {name: one.token_ids for name, one in expected.items()}
    assert engine.num_rounds_ahead > 10
    load = engine.scheduler.take_report().load
    assert load.num_free_pages == load.num_total_pages
    for name, rounds in num_rounds.items():
        all_rounds = sum(expected[name].rounds)
        assert rounds == all_rounds or (seed % 2 == 0 and rounds < all_rounds), "early exit"
