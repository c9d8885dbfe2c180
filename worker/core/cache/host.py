"""Host-memory tier of the KV cache: its slots, and the copies that the next Plan makes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from worker.core.cache.pool import FencedPool
from worker.plan.plan import PageCopies
from worker.protocol.host_cache import HostCacheTotals


class HostPool:
    """Slots of one page each in host memory, and copies between them and device pages.

        device page ──store──> slot ──load──> device page

    Copies are made by the next Plan: its stores first, then its loads, then its rows. So a page
    that is stored can be loaded into, or computed into, by the same Plan.

    HAZARD(fence): a slot is used again only when the last step with a copy that touches it has
    completed. The pages need no fence of their own: one that is stored was not locked, so no step
    in flight touches it, and one that is loaded into is locked by the lease it is loaded for.

    Args:
        num_slots: number of slots.
    """

    def __init__(self, num_slots: int) -> None:
        self._slots = FencedPool(0, num_slots)
        self._touched = [0] * num_slots
        """Last step that stores to a slot, by slot."""
        self._next_seq = 1
        """Number of the next Plan, which takes the copies."""
        self._stores = PageCopies([], [])
        """Copies to the host for the next Plan; the content must stay in these pages until then."""
        self._loads = PageCopies([], [])
        """Copies back to the device for the next Plan."""
        self._totals = HostCacheTotals(num_pages=num_slots)

    @property
    def num_free(self) -> int:
        """Slots that `store` can take now."""
        return self._slots.num_free

    @property
    def totals(self) -> HostCacheTotals:
        """Counts since the pool was made, for metrics."""
        used = self._totals.num_pages - self._slots.num_free - self._slots.num_fenced
        return replace(self._totals, num_used=used)

    def is_idle(self, slots: Iterable[int]) -> bool:
        """Whether no copy in flight touches any of them: released, they would be free at once."""
        return all(self._slots.passed(self._touched[slot]) for slot in slots)

    def store(self, pages: Sequence[int]) -> list[int]:
        """Has the next Plan copy device pages to free slots; returns these slots.

        The caller has checked that so many are free.
        """
        slots = self._slots.take(len(pages))
        self._stores.pages.extend(pages)
        self._stores.slots.extend(slots)
        for slot in slots:
            self._touched[slot] = self._next_seq
        self._totals.num_stored += len(pages)
        return slots

    def load(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        """Has the next Plan copy slots to device pages, and releases the slots after it."""
        self._loads.pages.extend(pages)
        self._loads.slots.extend(slots)
        self._slots.release(slots, self._next_seq)
        self._totals.num_loaded += len(slots)

    def forget(self, slots: Sequence[int]) -> None:
        """Releases slots whose content leaves the cache."""
        self._totals.num_evicted += len(slots)
        self._release(slots)

    def supersede(self, slots: Sequence[int]) -> None:
        """Releases slots whose content was computed again on the device."""
        self._totals.num_recomputed += len(slots)
        self._release(slots)

    def note_resumed(self, num_tokens: int, num_cached: int, num_loaded: int) -> None:
        """Counts the tokens of a preempted request that is admitted again: computed before it was
        preempted, of these found on the device, and loaded from the host."""
        self._totals.num_resumed_tokens += num_tokens
        self._totals.num_resumed_cached_tokens += min(num_cached, num_tokens)
        self._totals.num_resumed_loaded_tokens += num_loaded

    def note_load(self, seconds: float) -> None:
        """Adds the seconds that one step's loads took."""
        self._totals.load_s += seconds

    def take_copies(self, seq: int) -> tuple[PageCopies | None, PageCopies | None]:
        """Stores and loads for Plan `seq`, None for no copies; every Plan takes them."""
        assert seq == self._next_seq, f"Plan {seq} takes the copies of Plan {self._next_seq}"
        self._next_seq += 1
        stores, self._stores = self._stores, PageCopies([], [])
        loads, self._loads = self._loads, PageCopies([], [])
        return stores if stores.pages else None, loads if loads.pages else None

    def complete(self, seq: int) -> None:
        """Frees the slots that waited for steps up to `seq`."""
        self._slots.complete(seq)

    def check_invariants(self, held: Iterable[int]) -> None:
        """Asserts that the slots in `held` are all that are neither free nor fenced, each once."""
        self._slots.check_invariants(held)
        assert len(set(self._loads.pages)) == len(self._loads.pages), "a page is loaded twice"
        assert len(set(self._stores.slots)) == len(self._stores.slots), "a slot is stored twice"

    def _release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._slots.release([slot], self._touched[slot])
