"""States of requests in linear-attention layers on one rank, and snapshots of these states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from worker.models.layers.context import StateCache, StatePart, StateRows
from worker.models.layers.kv_cache import KVCacheLayout, StateSpec
from worker.plan.plan import StateLoad, StateStore
from worker.rank.batch import Batch
from worker.rank.cpu import lazy_zeros
from worker.rank.transfer import to_device


class RequestStates:
    """State caches: one row per slot, including the dummy slot, then one per snapshot.

    Args:
        layout: layout of the model's caches.
        num_slots: number of slots, the dummy slot included.
        num_snapshots: number of snapshots, which the scheduler assigns.
        device: the rank's device.
    """

    def __init__(
        self, layout: KVCacheLayout, num_slots: int, num_snapshots: int, device: torch.device
    ) -> None:
        self._num_slots = num_slots
        self._device = device
        self.caches: Mapping[int, StateCache] = {
            layer: _allocate(spec, num_slots + num_snapshots, device)
            for layer, spec in layout.states.items()
        }
        """State caches by layer."""

    def load(self, loads: Sequence[StateLoad]) -> None:
        """Copies snapshots into the states of slots."""
        if not loads:
            return
        snapshots = self._index([self._num_slots + load.snapshot for load in loads])
        slots = self._index([load.slot for load in loads])
        for cache in self.caches.values():
            cache.copy(snapshots, slots)

    def rows(self, batch: Batch) -> StateRows:
        """Rows of the state caches for a step's rows, and the snapshots to store."""
        assert batch.staged is not None, "the compiled library does not support states"
        assert batch.starts is not None, "the compiled library does not support states"
        assert batch.size is None, "steps with states do not run on graphs"
        border = batch.num_decodes
        stores: dict[int, list[StateStore]] = {}
        for store in batch.state_stores:
            stores.setdefault(store.slot, []).append(store)
        longer: list[tuple[int, list[StatePart]]] = []
        ends: list[StateStore] = []
        first = border
        for number, (slot, start, length, _) in enumerate(batch.rows.tolist()):
            row_stores = sorted(stores.get(slot, ()), key=lambda store: store.position)
            if number < border:
                ends += row_stores
                continue
            longer.append((slot, self._parts(first - start, start, start + length, row_stores)))
            first += length
        stored = None
        if ends:
            slots = self._index([store.slot for store in ends])
            stored = slots, self._index([self._num_slots + store.snapshot for store in ends])
        return StateRows(
            slots=batch.staged["slots"][:border],
            is_first=batch.starts[:border] == 0,
            longer=longer,
            stored=stored,
        )

    def _parts(
        self, offset: int, start: int, end: int, stores: Sequence[StateStore]
    ) -> list[StatePart]:
        """A row's positions [start, end), split where snapshots are stored; position p is token
        `offset` + p of the step."""
        parts: list[StatePart] = []
        for store in stores:
            parts.append(
                StatePart(
                    offset + start,
                    offset + store.position,
                    self._num_slots + store.snapshot,
                    start == 0,
                )
            )
            start = store.position
        if start < end:
            parts.append(StatePart(offset + start, offset + end, None, start == 0))
        return parts

    def _index(self, rows: list[int]) -> torch.Tensor:
        return to_device(torch.tensor(rows), self._device)


def _allocate(spec: StateSpec, count: int, device: torch.device) -> StateCache:
    return StateCache(
        conv=lazy_zeros((count, *spec.conv_shape), spec.dtype, device),
        recurrent=lazy_zeros((count, *spec.recurrent_shape), torch.float32, device),
    )
