"""The host-memory tier: which of its slots are free, and the copies that are due."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from worker.core.cache.pool import FencedPool
from worker.plan.plan import PageCopies
from worker.wire.host_cache import HostCacheTotals


class HostPool:
    """Slots in host memory, of a page each.

        device page ──store──> slot ──load──> device page

    Copies are made by the next Plan: its stores first, then its loads, then its rows. So a page
    that is stored can be loaded into, or computed into, by the same Plan.

    HAZARD(fence): a slot is used again only when the last step with a copy that touches it has
    completed. The pages need no fence of their own: one that is stored was not locked, so no step
    in flight touches it, and one that is loaded into is locked by the lease it is loaded for.

    Args:
        num_slots: how many there are.
    """

    def __init__(self, num_slots: int) -> None:
        self._slots = FencedPool(0, num_slots)
        self._touched = [0] * num_slots
        """By slot: the last step that stores to it."""
        self._next_seq = 1
        """Of the Plan that takes the copies."""
        self._stores = PageCopies([], [])
        """For the next Plan; until then the content must stay in these pages."""
        self._loads = PageCopies([], [])
        self._totals = HostCacheTotals(num_pages=num_slots)

    @property
    def num_free(self) -> int:
        """Slots that `store` can take now."""
        return self._slots.num_free

    @property
    def totals(self) -> HostCacheTotals:
        """Counts so far."""
        used = self._totals.num_pages - self._slots.num_free - self._slots.num_fenced
        return replace(self._totals, num_used=used)

    def is_idle(self, slots: Iterable[int]) -> bool:
        """Whether no copy in flight touches any of them: released, they would be free at once."""
        return all(self._slots.passed(self._touched[slot]) for slot in slots)

    def store(self, pages: Sequence[int]) -> list[int]:
        """Has the content of device pages copied; the slots that will hold it.

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
        """Has slots copied to device pages, and gives the slots back."""
        self._loads.pages.extend(pages)
        self._loads.slots.extend(slots)
        self._slots.release(slots, self._next_seq)
        self._totals.num_loaded += len(slots)

    def forget(self, slots: Sequence[int]) -> None:
        """Gives slots back whose content nobody will need."""
        self._totals.num_evicted += len(slots)
        self._release(slots)

    def supersede(self, slots: Sequence[int]) -> None:
        """Gives slots back whose content was computed again."""
        self._totals.num_recomputed += len(slots)
        self._release(slots)

    def note_resumed(self, num_tokens: int, num_cached: int, num_loaded: int) -> None:
        """A request came again of which so many tokens had been computed."""
        self._totals.num_resumed_tokens += num_tokens
        self._totals.num_resumed_cached_tokens += min(num_cached, num_tokens)
        self._totals.num_resumed_loaded_tokens += num_loaded

    def note_load(self, seconds: float) -> None:
        """A step's loads took so long."""
        self._totals.load_s += seconds

    def take_copies(self, seq: int) -> tuple[PageCopies | None, PageCopies | None]:
        """Stores and loads for Plan `seq`, None for no copies; every Plan takes them."""
        assert seq == self._next_seq, f"Plan {seq} takes the copies of Plan {self._next_seq}"
        self._next_seq += 1
        stores, self._stores = self._stores, PageCopies([], [])
        loads, self._loads = self._loads, PageCopies([], [])
        return stores if stores.pages else None, loads if loads.pages else None

    def complete(self, seq: int) -> None:
        """Frees what waited for steps up to `seq`."""
        self._slots.complete(seq)

    def check_invariants(self, held: Iterable[int]) -> None:
        """Asserts that the slots in `held` are all that are neither free nor fenced, each once."""
        self._slots.check_invariants(held)
        assert len(set(self._loads.pages)) == len(self._loads.pages), "a page is loaded twice"
        assert len(set(self._stores.slots)) == len(self._stores.slots), "a slot is stored twice"

    def _release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._slots.release([slot], self._touched[slot])
