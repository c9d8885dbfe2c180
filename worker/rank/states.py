"""One rank's per-request states, for layers that keep them, and snapshots of these states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kernels.states import StateCache, StateRows
from worker.models.layers.kv_cache import KVCacheLayout, StatePlane
from worker.plan.plan import Plan
from worker.rank.batch import Batch, longest_row
from worker.rank.cpu import lazy_zeros
from worker.rank.state_replays import StateReplays
from worker.rank.transfer import to_device


class RequestStates:
    """State caches: one row per slot, including the dummy slot, then one per snapshot.

    Args:
        layout: layout of the model's caches.
        num_slots: number of slots, including the dummy slot.
        num_snapshots: number of snapshots, which the scheduler assigns.
        device: the rank's device.
        num_replayed: maximum number of tokens of a draft row; 0 if there are no drafts.
    """

    def __init__(
        self,
        layout: KVCacheLayout,
        num_slots: int,
        num_snapshots: int,
        device: torch.device,
        *,
        num_replayed: int = 0,
    ) -> None:
        self.num_slots = num_slots
        """Number of slots; snapshot `n` is state `num_slots + n` of the caches."""
        self._device = device
        self.caches: Mapping[int, StateCache] = {
            layer: StateCache(
                planes=_allocate(spec.planes, num_slots + num_snapshots, device),
                inputs=_allocate(spec.inputs, num_slots * num_replayed, device),
            )
            for layer, spec in layout.states.items()
        }
        """State caches by layer."""
        self.replays: StateReplays | None = None
        """Replays of accepted drafts; None if there are no drafts."""
        if num_replayed:
            self.replays = StateReplays(num_slots, num_replayed, device)

    def prepare(self, plan: Plan) -> None:
        """Copies snapshots into the states of slots before the rows of a step, and resets the
        drafts of slots that get new requests."""
        if self.replays is not None:
            self.replays.admit(plan.admits)
        loads = plan.state_loads
        if not loads:
            return
        snapshots = self._index([self.num_slots + load.snapshot for load in loads])
        slots = self._index([load.slot for load in loads])
        for cache in self.caches.values():
            cache.copy(snapshots, slots)

    def rows(self, batch: Batch, max_model_len: int) -> StateRows:
        """Rows of the state caches for a step's rows, and the snapshots to store."""
        assert batch.staged is not None, "the compiled library does not support states"
        assert batch.starts is not None, "the compiled library does not support states"
        replayed = None
        if batch.has_replay:
            assert self.replays is not None, "no drafts"
            replayed = self.replays.step(batch)
        return StateRows(
            slots=batch.staged["slots"],
            starts=batch.starts,
            piece_starts=batch.staged["piece_starts"],
            piece_rows=batch.staged["piece_rows"],
            piece_targets=batch.staged["piece_targets"],
            row_pieces=batch.staged["row_pieces"],
            num_decodes=batch.num_decodes,
            longest=longest_row(batch, max_model_len),
            kept=None if replayed is None else replayed.kept,
            replay=None if replayed is None else replayed.replay,
        )

    def _index(self, rows: list[int]) -> torch.Tensor:
        return to_device(torch.tensor(rows), self._device)


def _allocate(
    planes: Sequence[StatePlane], count: int, device: torch.device
) -> tuple[torch.Tensor, ...]:
    if not count:
        return ()
    return tuple(lazy_zeros((count, *plane.shape), plane.dtype, device) for plane in planes)
