"""Replay of accepted drafts into states, against a hash of all tokens of a request."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from kernels.states import Inputs, StateRows, advance_rows, advance_with_drafts
from tests.support.effort import IS_LONG
from worker.models.layers.kv_cache import KVCacheSpec, StatePlane, StateSpec, group_layers
from worker.plan.plan import Admit, DraftRow, Plan, PlannedRow, Row, StateLoad, StateStore
from worker.rank import state_replays
from worker.rank.batch import Batch, BatchBuilder
from worker.rank.states import RequestStates
from worker.rank.tables import DeviceTables

NUM_SLOTS, NUM_SNAPSHOTS, MOST_DRAFTS, LENGTH, PAGE = 3, 4, 4, 64, 4
VOCAB, MODULUS = 1000, 2**20
ROWS = 1 + NUM_SLOTS
"""Rows of a graph."""
GRAPH_TOKENS = 32


def hashed(state: int, token: int) -> int:
    return (state * 31 + token + 7) % MODULUS


def hash_of(tokens: list[int]) -> int:
    state = 0
    for token in tokens:
        state = hashed(state, token)
    return state


@dataclass
class Slot:
    tokens: list[int]
    """All tokens that the request will have."""
    newest: int
    """Position of the first token that is not computed."""
    planned: int
    """The same, as known when a step is planned while another one runs."""


class Device:
    """A layer whose state is a hash of all tokens, and a scheduler that knows them."""

    def __init__(self, rng: random.Random, *, on_graphs: bool) -> None:
        self.rng, self.on_graphs = rng, on_graphs
        plane = StatePlane((1,), torch.int64)
        keys = KVCacheSpec(num_kv_heads=1, head_dim=1, dtype=torch.float32)
        layout = group_layers([keys, None], [None, StateSpec(planes=(plane,), inputs=(plane,))])
        device = torch.device("cpu")
        self.tables = DeviceTables(
            max_num_seqs=NUM_SLOTS,
            max_model_len=LENGTH + MOST_DRAFTS + 1,
            page_size=PAGE,
            vocab_size=VOCAB,
            device=device,
            keeps_states=True,
            num_replayed=1 + MOST_DRAFTS,
        )
        self.builder = BatchBuilder(self.tables)
        self.states = RequestStates(
            layout, NUM_SLOTS + 1, NUM_SNAPSHOTS, device, num_replayed=1 + MOST_DRAFTS
        )
        (self.cache,) = self.states.caches.values()
        self.slots: dict[int, Slot] = {}
        self.snapshots: list[list[int] | None] = [None] * NUM_SNAPSHOTS
        """Tokens of each snapshot's state."""
        self.seq = self.num_accepted = self.num_stored = self.num_replays = 0

    def admit(self, slot: int, free: list[int]) -> tuple[Admit, StateLoad | None]:
        """A new request for a slot; it may continue a snapshot."""
        number, load, known = self.rng.choice(free), None, list[int]()
        if (tokens := self.snapshots[number]) is not None and len(tokens) < LENGTH - 16:
            known, load = list(tokens), StateLoad(slot, number)
            free.remove(number)  # it is not stored in the same step
        row = known + [self.rng.randrange(VOCAB) for _ in range(LENGTH - len(known))]
        self.slots[slot] = Slot(row, len(known), len(known))
        prompt = np.array(row, dtype="<i4").tobytes()
        return Admit(slot, prompt, 0.0, 0, 1.0, 0.0, 0), load

    def step(self) -> None:
        """A step of some slots: prompts, decodes and drafts, and snapshots of their states."""
        admits, loads, rows, stores = list[Admit](), list[StateLoad](), list[Row](), []
        firsts: dict[int, int] = {}
        drafts: dict[int, list[int]] = {}
        free = list(range(NUM_SNAPSHOTS))
        for slot in self.rng.sample(range(NUM_SLOTS), self.rng.randint(1, NUM_SLOTS)):
            if slot not in self.slots or self.slots[slot].newest > LENGTH - 8:
                admit, load = self.admit(slot, free)
                admits.append(admit)
                loads += [] if load is None else [load]
            one = self.slots[slot]
            if one.newest > 4 and self.rng.random() < 0.7:
                rows.append(self._draft_row(slot, one, firsts, drafts))
                last = one.newest
            else:
                length = self.rng.choice((1, 1, 3, 6)) if one.newest else 5
                rows.append(PlannedRow(slot, one.newest, length, 0))
                last = one.newest + length
            if self.rng.random() < 0.6 and len(free) > 1:
                position = self.rng.randint(max(1, one.newest - MOST_DRAFTS), last)
                stores.append(StateStore(slot, position, free.pop()))
        rows.sort(key=lambda row: (row.length > 1, isinstance(row, PlannedRow)))
        self.seq += 1
        plan = Plan(self.seq, admits, [], rows, state_loads=loads, state_stores=stores)
        for store in stores:
            self.cache.planes[0][NUM_SLOTS + 1 + store.snapshot] = -1
            self.snapshots[store.snapshot] = None
        self._run(plan, firsts, drafts)

    def _draft_row(
        self, slot: int, one: Slot, firsts: dict[int, int], drafts: dict[int, list[int]]
    ) -> DraftRow:
        """A draft row that the device places after the planned position, maybe so that it begins
        before the newest token."""
        count = self.rng.randint(0, MOST_DRAFTS)
        first = self.rng.randint(max(one.planned, one.newest - count), one.newest)
        right = self.rng.randint(0, count)
        known = one.tokens[one.newest + 1 : one.newest + 1 + count]
        drafts[slot] = known[:right] + [(token + 1) % VOCAB for token in known[right:]]
        firsts[slot] = first
        return DraftRow(slot, one.planned, 1 + count, count)

    def _run(self, plan: Plan, firsts: dict[int, int], drafts: dict[int, list[int]]) -> None:
        self.states.prepare(plan)
        assert self.states.replays is not None
        found = self.states.replays.next_rows(plan.rows)
        graph = {"size": ROWS, "num_tokens": GRAPH_TOKENS} if self.on_graphs else {}
        batch = self.builder.build(plan, drafts=found, **graph)  # type: ignore[arg-type]
        assert batch is not None
        assert batch.starts is not None
        starts = batch.starts.clone()
        for number, row in enumerate(plan.rows):
            starts[number] = firsts.get(row.slot, row.start)
        batch = replace(batch, starts=starts)
        outputs = self._forward(batch, drafts)
        token = 0
        for row, first in zip(plan.rows, starts.tolist(), strict=False):
            self._check(row, first, drafts, outputs[token : token + row.length])
            token += row.length
        self._check_snapshots(plan, firsts)
        for row in plan.rows:
            one = self.slots[row.slot]
            one.planned = one.newest + 1
            if isinstance(row, PlannedRow):
                one.newest = one.planned = row.start + row.length
                continue
            # Tokens that are accepted: the newest one, and drafts up to the first wrong one.
            known = one.tokens[one.newest + 1 :]
            computed = firsts[row.slot] + row.length - one.newest - 1
            right = 0
            while right < computed and drafts[row.slot][right] == known[right]:
                right += 1
            if computed >= 0:
                one.newest += 1 + right
                self.num_accepted += right
            one.planned = min(one.planned, one.newest)

    def _forward(self, batch: Batch, drafts: dict[int, list[int]]) -> list[int]:
        rows = self.states.rows(batch, LENGTH)
        self.num_replays += rows.replay is not None
        assert batch.starts is not None
        ids: list[int] = []
        for (slot, _, length, _), first in zip(
            batch.rows.tolist(), batch.starts.tolist(), strict=True
        ):
            known = [0] * length
            if slot < NUM_SLOTS:
                one = self.slots[slot]
                own = one.tokens[: one.newest + 1] + drafts.get(slot, [])
                own += [] if slot in drafts else one.tokens[one.newest + 1 :]
                known = own[first : first + length]
            ids += known
        x = torch.tensor(ids)[:, None]
        return advance_with_drafts([x], self.cache, rows, self._advance)[:, 0].long().tolist()

    def _advance(self, inputs: Inputs, rows: StateRows) -> torch.Tensor:
        (x,) = inputs

        def steps(own: slice, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            state = (state * 31 + x[own] + 7) % MODULUS
            return state.float(), state

        def chunk(own: slice, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            outputs = []
            for token in x[own]:
                state = (state * 31 + token + 7) % MODULUS
                outputs.append(state.float())
            return torch.stack(outputs), state

        return advance_rows(self.cache.planes[0], rows, steps, chunk, x.shape)

    def _check(
        self, row: Row, first: int, drafts: dict[int, list[int]], outputs: list[int]
    ) -> None:
        one = self.slots[row.slot]
        own = one.tokens
        if row.slot in drafts:
            own = one.tokens[: one.newest + 1] + drafts[row.slot]
        assert outputs == [hash_of(own[: first + n + 1]) for n in range(row.length)], row

    def _check_snapshots(self, plan: Plan, firsts: dict[int, int]) -> None:
        """A snapshot is exact, or was not stored: then the state did not pass its position."""
        for store in plan.state_stores:
            content = int(self.cache.planes[0][NUM_SLOTS + 1 + store.snapshot])
            (row,) = (row for row in plan.rows if row.slot == store.slot)
            if content == -1:
                first = firsts.get(row.slot, row.start)
                assert isinstance(row, DraftRow) or store.position <= row.start
                assert store.position > first or store.position <= self.slots[row.slot].planned
                continue
            known = self.slots[store.slot].tokens[: store.position]
            assert content == hash_of(known), store
            self.snapshots[store.snapshot] = known
            self.num_stored += store.position <= row.start


@pytest.mark.randomized  # with more steps
@pytest.mark.parametrize("on_graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("bounds", [False, True], ids=["exact", "bounds"])
def test_states_are_those_of_accepted_tokens(
    on_graphs: bool, bounds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    uses: Callable[[torch.device], bool] = lambda _: bounds  # noqa: E731
    monkeypatch.setattr(state_replays.registry, "uses_triton", uses)
    device = Device(random.Random(7), on_graphs=on_graphs)
    for _ in range(3000 if IS_LONG else 150):
        device.step()
    assert min(device.num_accepted, device.num_stored, device.num_replays) > 20
