"""Which worker holds which block of tokens, exactly as the workers' events tell."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from worker.wire.messages import BlockEvent, BlockStored


class PrefixIndex:
    """Block hash → workers that hold the block.

    Hashes are chained, so the table is flat: one lookup per block, and the holders of a prefix are
    the intersection along it. Workers are bits of an integer.
    """

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        self._blocks: dict[str, set[int]] = {}
        self._bits: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def num_blocks(self, worker_id: str) -> int:
        """Blocks that one worker holds."""
        return len(self._blocks.get(worker_id, ()))

    def replace(self, worker_id: str, stored: Iterable[BlockStored]) -> None:
        """Forgets what the worker held; `stored` is its whole cache now."""
        self.drop(worker_id)
        self.apply(worker_id, stored)

    def apply(self, worker_id: str, events: Iterable[BlockEvent]) -> None:
        """Takes blocks that entered or left the worker's cache, in order."""
        for event in events:
            if isinstance(event, BlockStored):
                self._store(worker_id, event.block_hashes)
            else:
                self._remove(worker_id, event.block_hashes)

    def drop(self, worker_id: str) -> None:
        """Forgets a worker."""
        self._remove(worker_id, list(self._blocks.get(worker_id, ())))
        self._blocks.pop(worker_id, None)
        self._bits.pop(worker_id, None)

    def match(self, hashes: Sequence[int]) -> dict[str, int]:
        """For each worker that holds the first block, how many leading blocks it holds."""
        lengths: list[tuple[int, int]] = []
        alive = -1
        for length, block_hash in enumerate(hashes):
            holders = self._holders.get(block_hash, 0) & alive
            if holders != alive:
                if length:
                    lengths.append((alive & ~holders, length))
                alive = holders
                if not alive:
                    break
        else:
            if hashes:
                lengths.append((alive, len(hashes)))
        return {
            worker_id: length
            for workers, length in lengths
            for worker_id, bit in self._bits.items()
            if workers & bit
        }

    def _store(self, worker_id: str, hashes: Sequence[int]) -> None:
        bit = self._bits.get(worker_id)
        if bit is None:
            bit = self._free_bit()
            self._bits[worker_id] = bit
            self._blocks[worker_id] = set()
        holders = self._holders
        for block_hash in hashes:
            holders[block_hash] = holders.get(block_hash, 0) | bit
        self._blocks[worker_id].update(hashes)

    def _remove(self, worker_id: str, hashes: Sequence[int]) -> None:
        bit = self._bits.get(worker_id)
        if bit is None:
            return
        for block_hash in hashes:
            left = self._holders.get(block_hash, 0) & ~bit
            if left:
                self._holders[block_hash] = left
            else:
                self._holders.pop(block_hash, None)
        self._blocks[worker_id].difference_update(hashes)

    def _free_bit(self) -> int:
        taken = 0
        for bit in self._bits.values():
            taken |= bit
        return ~taken & (taken + 1)
