"""A fake device made of lists that only sees Plans, and a harness that drives a scheduler with it.

The content of a KV position is a hash of all tokens up to it, so that a wrong page, a page reused
too early or a wrong prefix hit results in wrong content. Admissions and page writes take effect
when a Plan is launched, rows only when its result is taken: tables that change during a step in
flight are detected, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from worker.core.scheduler import Scheduler, SchedulerConfig
from worker.plan.plan import (
    AdapterReadResult,
    PageCopies,
    Plan,
    PlannedRow,
    SampleDigest,
    StepResult,
)
from worker.protocol.adapters import AdapterRef
from worker.protocol.messages import (
    BlockEvent,
    BlockStored,
    Rejection,
    StepReport,
    Submit,
    TokenDelta,
)
from worker.protocol.options import from_options
from worker.protocol.sampling import SamplingParams

VOCAB = 50
EOS = (1, 2)
MASK = 2**61 - 1
POISON = -1
SALT_SEEDS = 1000
"""Divisor of seeds: the quotient is the index of the salt, because the device does not know salts.
"""


def step_hash(before: int, token: int) -> int:
    return hash((before, token)) & MASK


def draw(seed: int, position: int, content: int) -> int:
    """The token at `position`, given the content of the position before it."""
    return hash((seed, position, content)) % VOCAB


def start_hash(seed: int, folder: str = "") -> int:
    """Content before the first position, which depends on the salt and the adapter."""
    salt = seed // SALT_SEEDS
    return hash((salt, folder)) & MASK if folder else salt


@dataclass
class SlotRow:
    seed: int
    tokens: list[int]
    contents: list[int]
    """Expected content per position."""
    tables: list[list[int]]
    """Page of each block, by group of layers; 0 if the page was freed before the admission."""
    state: int = POISON
    """Content of the last computed position, for layers that keep a state."""
    is_pooled: bool = False
    """Whether the request returns the content of its last position."""
    adapter: int = 0
    """Slot of the request's adapter; 0 if it has none."""
    folder: str = ""
    """Folder of the adapter that was in the slot when the request was admitted."""

    def content(self, position: int) -> int:
        while len(self.contents) <= position:
            before = self.contents[-1] if self.contents else start_hash(self.seed, self.folder)
            self.contents.append(step_hash(before, self.tokens[len(self.contents)]))
        return self.contents[position]


BROKEN = "broken"
"""Text in the folder of adapters that cannot be read."""


class FakeAdapters:
    """Adapters of a rank: reads in the background, copies in host memory, slots on the device."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.reading: dict[int, int] = {}
        """Steps until a read is reported, by key."""
        self.host: dict[int, str] = {}
        """Folders by key."""
        self.slots: dict[int, str] = {}
        """Folders by slot."""
        self.num_loads = 0
        self.read_steps: Callable[[], int] = lambda: 1
        """Function that returns the number of steps that a read takes."""

    def launch(self, plan: Plan, busy: set[int]) -> None:
        """Applies a Plan; `busy` are the adapter slots of rows in flight."""
        for read in plan.adapter_reads:
            assert read.key not in self.host, "a key is used again"
            self.host[read.key] = read.folder
            self.reading[read.key] = self.read_steps()
        for load in plan.adapter_loads:
            assert 1 <= load.slot <= self.config.max_loras
            assert load.slot not in busy, "an adapter is replaced under a step in flight"
            assert load.key not in self.reading, "an adapter is loaded before it has been read"
            self.slots[load.slot] = self.host[load.key]
            self.num_loads += 1
        reads = {read.key for read in plan.adapter_reads}
        assert reads.isdisjoint(plan.adapter_drops), "ranks drop after they have begun to read"
        for key in plan.adapter_drops:
            del self.host[key]
            self.reading.pop(key, None)
        assert len(self.host) <= self.config.max_cpu_loras

    def ended(self) -> list[AdapterReadResult]:
        """The reads that a step reports."""
        done = [key for key, num_steps in self.reading.items() if num_steps <= 0]
        self.reading = {key: n - 1 for key, n in self.reading.items() if n > 0}
        return [
            AdapterReadResult(key, 0.25, "no such file" if BROKEN in self.host[key] else "")
            for key in done
        ]


def adapter_ref(number: int) -> AdapterRef:
    """A valid adapter; for a negative number, one that cannot be read."""
    folder = f"/{BROKEN if number < 0 else 'adapters'}/{number}"
    return AdapterRef(f"adapter {number}", folder, f"version {number}")


@dataclass
class FakeLoads:
    """Loads of a Plan from host memory. A late rank loads only when a Plan requires it."""

    plan: Plan
    num_steps: int
    """Number of steps until the loads are reported as done."""
    is_late: bool
    is_done: bool = False

    @property
    def pages(self) -> list[int]:
        return [] if self.plan.loads is None else self.plan.loads.pages

    @property
    def slots(self) -> list[int]:
        return [] if self.plan.loads is None else self.plan.loads.slots

    @property
    def snapshots(self) -> list[int]:
        copies = self.plan.host_state_loads
        return [] if copies is None else copies.slots


class FakeDevice:
    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.slots: dict[int, SlotRow] = {}
        self.pages = [[POISON] * config.page_size for _ in range(config.num_pages)]
        self.host = [[POISON] * config.page_size for _ in range(config.num_host_pages)]
        self.snapshots = [POISON] * config.page_groups.num_snapshots(config.num_pages - 1)
        self.host_snapshots = [POISON] * config.page_groups.num_snapshots(config.num_host_pages)
        self.in_flight: deque[Plan] = deque()
        self.launched = 0
        self.digest = SampleDigest()
        self.num_rows = 0
        self.num_waiting = 0
        """Number of admissions without a row because pages must be loaded first."""
        self.token_ms = 0.0
        """Milliseconds of a step per token, in addition to the fixed part."""
        self.load_ms = 0.5
        """Milliseconds to load a page."""
        self.loads: deque[FakeLoads] = deque()
        """Loads that are not done, or not reported."""
        self.reported: set[int] = set()
        """Plans whose loads are reported as done."""
        self.load_time: Callable[[], tuple[int, bool]] = lambda: (0, False)
        """Function that returns the number of steps that loads take, and whether this rank is late.
        """
        self.adapters = FakeAdapters(config)

    def launch(self, plan: Plan) -> None:
        assert plan.seq == self.launched + 1
        self.launched = plan.seq
        busy = {row.slot for other in self.in_flight for row in other.rows}
        self.adapters.launch(plan, {self.slots[slot].adapter for slot in busy})
        for admit in plan.admits:
            assert admit.slot not in busy, "slot rewritten under a step in flight"
            tokens = np.frombuffer(admit.token_ids, "<i4").tolist()
            tables: list[list[int]] = [[] for _ in range(self.config.page_groups.num_groups)]
            folder = self.adapters.slots[admit.adapter] if admit.adapter else ""
            self.slots[admit.slot] = SlotRow(
                *(admit.seed, tokens, [], tables),
                is_pooled=admit.pooling is not None,
                adapter=admit.adapter,
                folder=folder,
            )
        for write in plan.page_writes:
            pages = self.slots[write.slot].tables[write.group]
            if not pages and write.group >= self.config.page_groups.num_full:
                pages += [0] * write.start
            assert write.start == len(pages), "a page-table entry was skipped or rewritten"
            assert 0 not in write.page_ids, "page 0 is the dummy"
            pages += write.page_ids
        stored = {store.snapshot for store in plan.state_stores}
        for other in (*self.in_flight, plan):
            assert stored.isdisjoint(load.snapshot for load in other.state_loads)
            if other is not plan:
                assert stored.isdisjoint(store.snapshot for store in other.state_stores)
        self.num_waiting += len({admit.slot for admit in plan.admits} - {r.slot for r in plan.rows})
        assert plan.rows or self.adapters.reading
        assert len({row.slot for row in plan.rows}) == len(plan.rows)
        lengths = [row.length for row in plan.rows]
        assert sum(lengths) <= self.config.max_num_batched_tokens
        assert lengths == sorted(lengths, key=lambda n: n > 1), "rows of length 1 come first"
        if plan.digest_seq:
            assert plan.digest == self.digest.value(plan.digest_seq)
        self.in_flight.append(plan)

    def run(self) -> StepResult:
        plan = self.in_flight.popleft()
        assert plan.loaded <= plan.seq
        self._finish_loads(min(plan.loaded, plan.seq - 1))
        self._store(plan.stores)
        if plan.host_state_stores is not None:
            copies = plan.host_state_stores
            for snapshot, host_snapshot in zip(copies.pages, copies.slots, strict=True):
                assert self.snapshots[snapshot] != POISON, "a snapshot was used again too early"
                self.host_snapshots[host_snapshot] = self.snapshots[snapshot]
        assert plan.load_stores is None or plan.loads is not None
        if plan.loads is not None or plan.host_state_loads is not None:
            self.loads.append(FakeLoads(plan, *self.load_time()))
            if not self.loads[-1].is_late:
                self._load(self.loads[-1])
        self._finish_loads(plan.loaded)
        for load in plan.state_loads:
            assert self.snapshots[load.snapshot] != POISON, "a snapshot was used again too early"
            self.slots[load.slot].state = self.snapshots[load.snapshot]
        # Rows run in parallel on a real device: all reads of pages from earlier steps, then all
        # writes.
        rows = [row for row in plan.rows if isinstance(row, PlannedRow)]
        assert len(rows) == len(plan.rows), "this device knows neither drafts nor blocks"
        for row in rows:
            self._check_past(row)
        for row in rows:
            self._write(row)
        for store in plan.state_stores:
            (row,) = (row for row in rows if row.slot == store.slot)
            assert row.start < store.position <= row.start + row.length, "not a state of the row"
            content = self.slots[store.slot].content(store.position - 1)
            self.snapshots[store.snapshot] = content
        sampled = [self._sample(row) for row in rows if row.num_samples]
        pooled = {
            index: self.slots[row.slot].content(row.start + row.length - 1).to_bytes(8, "little")
            for index, row in enumerate(rows)
            if self.slots[row.slot].is_pooled
            and row.start + row.length == len(self.slots[row.slot].tokens)
        }
        self.num_rows += len(rows)
        self.digest.update(plan.seq, sampled)
        load_ms, loading = self._report_loads(plan)
        compute_ms = 1.5 + self.token_ms * sum(row.length for row in rows)
        return StepResult(
            *(plan.seq, sampled, compute_ms),
            load_ms=load_ms,
            loading=loading,
            pooled=pooled or None,
            adapters_read=self.adapters.ended(),
        )

    def _store(self, copies: PageCopies | None) -> None:
        if copies is not None:
            for page, slot in zip(copies.pages, copies.slots, strict=True):
                assert POISON not in self.pages[page], "a page was used again too early"
                self.host[slot] = list(self.pages[page])

    def _load(self, loads: FakeLoads) -> None:
        plan, loads.is_done = loads.plan, True
        self._store(plan.load_stores)
        for page, slot in zip(loads.pages, loads.slots, strict=True):
            assert POISON not in self.host[slot], "a slot was used again too early"
            self.pages[page] = list(self.host[slot])
        if plan.host_state_loads is not None:
            copies = plan.host_state_loads
            for number, host_snapshot in zip(copies.pages, copies.slots, strict=True):
                assert self.host_snapshots[host_snapshot] != POISON, "used again too early"
                self.slots[number].state = self.host_snapshots[host_snapshot]

    def _finish_loads(self, seq: int) -> None:
        for loads in self.loads:
            if loads.plan.seq <= seq:
                loads.num_steps = 0
                if not loads.is_done:
                    self._load(loads)

    def _report_loads(self, plan: Plan) -> tuple[float, int]:
        """Time of the loads that have ended, and the first Plan whose loads have not."""
        load_ms, loading = 0.0, 0
        for loads in self.loads:
            if loads.num_steps or loading:
                loads.num_steps = max(loads.num_steps - 1, 0)
                loading = loading or loads.plan.seq
            elif loads.plan.seq not in self.reported:
                self.reported.add(loads.plan.seq)
                load_ms += self.load_ms * len(loads.pages)
        while self.loads and self.loads[0].is_done and self.loads[0].plan.seq in self.reported:
            self.loads.popleft()
        return load_ms, loading

    def poison(
        self, pages: list[int], slots: list[int], snapshots: list[int], host_snapshots: list[int]
    ) -> None:
        for snapshot in snapshots:
            self.snapshots[snapshot] = POISON
        for snapshot in host_snapshots:
            self.host_snapshots[snapshot] = POISON
        for page in pages:
            self.pages[page] = [POISON] * self.config.page_size
        for slot in slots:
            self.host[slot] = [POISON] * self.config.page_size

    def _check_past(self, row: PlannedRow) -> None:
        slot, size, groups = self.slots[row.slot], self.config.page_size, self.config.page_groups
        assert self.adapters.slots.get(slot.adapter, "") == slot.folder, "its adapter was replaced"
        if row.start:
            content = slot.content(row.start - 1)
            assert slot.state == content or not self.snapshots, "a row continues from another state"
        for group, table in enumerate(slot.tables):
            seen = 0 if group < groups.num_full else max(0, row.start + 1 - groups.window)
            begin, num_pages = seen - seen % size, -(-row.start // size)
            pages = [self.pages[page] for page in table[begin // size : num_pages]]
            found = list(chain.from_iterable(pages))[seen - begin : row.start - begin]
            assert found == slot.contents[seen : row.start], "wrong content behind a row"

    def _write(self, row: PlannedRow) -> None:
        slot, size = self.slots[row.slot], self.config.page_size
        assert row.length >= 1
        for position in range(row.start, row.start + row.length):
            for table in slot.tables:
                self.pages[table[position // size]][position % size] = slot.content(position)
        slot.state = slot.content(row.start + row.length - 1)

    def _sample(self, row: PlannedRow) -> int:
        slot, end = self.slots[row.slot], row.start + row.length
        assert end == len(slot.tokens), "sampled before the last token"
        assert not slot.is_pooled, "a pooled request samples nothing"
        slot.tokens.append(draw(slot.seed, end, slot.content(end - 1)))
        return slot.tokens[-1]


def prompt_content(submit: Submit) -> int:
    """Content of the last position of a prompt."""
    folder = submit.adapter.folder if submit.adapter else ""
    content = start_hash(submit.sampling.seed or 0, folder)
    for token in np.frombuffer(submit.prompt, "<i4").tolist():
        content = step_hash(content, token)
    return content


def expected_output(submit: Submit, config: SchedulerConfig) -> tuple[list[int], str, int | None]:
    """Output of a request that runs alone: tokens, finish reason, stop reason."""
    params = submit.sampling
    if params.pooling is not None:
        return [], "stop", None
    tokens = np.frombuffer(submit.prompt, "<i4").tolist()
    content = prompt_content(submit)
    output: list[int] = tokens[len(tokens) - submit.num_resumed :]
    num_resumed = submit.num_resumed
    while True:
        if params.max_tokens is not None and len(output) >= params.max_tokens:
            return output[num_resumed:], "length", None
        if len(tokens) >= config.max_total_tokens:
            return output[num_resumed:], "length", None
        token = draw(params.seed or 0, len(tokens), content)
        tokens.append(token)
        output.append(token)
        content = step_hash(content, token)
        if len(output) >= params.min_tokens:
            if token in EOS and not params.ignore_eos:
                return output[num_resumed:], "stop", None
            if token in params.stop_token_ids:
                return output[num_resumed:], "stop", token


def make_submit(request_id: str, prompt: list[int], **options: object) -> Submit:
    """A submit; options beyond Submit's own fields are SamplingParams'."""
    own = {"attempt", "cache_salt", "priority", "gateway_id", "num_resumed", "num_expected_cached"}
    own |= {"is_resubmitted", "slo", "tenant", "waited_ms", "adapter"}
    sampling = {name: value for name, value in options.items() if name not in own}
    sampling.setdefault("seed", 7)
    rest = {name: value for name, value in options.items() if name in own}
    rest.setdefault("gateway_id", "g0")
    return Submit(
        request_id=request_id,
        prompt=np.asarray(prompt, "<i4").tobytes(),
        sampling=SamplingParams(**sampling),  # type: ignore[arg-type]
        **rest,  # type: ignore[arg-type]
    )


@dataclass
class Outcome:
    submit: Submit
    tokens: list[int] = field(default_factory=list)
    num_cached: int = -1
    finish_reason: str | None = None
    stop_reason: int | None = None
    pooled: bytes | None = None
    rejection: Rejection | None = None


class Harness:
    """A scheduler with a FakeDevice, and the state that a frontend keeps of its reports."""

    def __init__(self, *, checked: bool = True, **limits: object) -> None:
        defaults: dict[str, object] = {
            "max_num_seqs": 4,
            "max_num_batched_tokens": 16,
            "max_model_len": 64,
            "page_size": 4,
            "num_pages": 33,
            "eos_token_ids": EOS,
            "block_hash_salt": "m",
            "max_queued_requests": 0,
            "num_ranks": 2,
        }
        self.config = from_options(SchedulerConfig, {**defaults, **limits})
        self.now = 0.0
        self.scheduler = Scheduler(self.config, lambda: self.now)
        self.device = FakeDevice(self.config)
        self.outcomes: dict[tuple[str, int], Outcome] = {}
        self.mirror: dict[int, int | None] = {}
        """Blocks on the device."""
        self.host_mirror: dict[int, int | None] = {}
        self.reports = 0
        self.checked = checked
        self.last: StepReport | None = None

    def submit(self, submit: Submit) -> Outcome:
        key = (submit.request_id, submit.attempt)
        self.outcomes.setdefault(key, Outcome(submit))
        self.scheduler.add(submit)
        self.check()
        return self.outcomes[key]

    def schedule(self) -> Plan | None:
        plan = self.scheduler.schedule()
        if plan is not None:
            self.device.launch(plan)
        self.check()
        return plan

    def apply(self) -> None:
        self.scheduler.apply(self.device.run())
        self.report()
        self.check()

    def step(self, depth: int = 0) -> bool:
        """Runs one step like the engine: launches it, and takes the results of steps beyond
        `depth`. Returns False if idle."""
        plan = self.schedule()
        busy = bool(self.device.in_flight)
        if busy and (plan is None or len(self.device.in_flight) > depth):
            self.apply()
        return busy

    def drain(self, depth: int = 0) -> None:
        while self.step(depth):
            pass
        self.report()
        assert not self.scheduler.has_work()
        while self.scheduler.state.cache.await_loads():  # of aborted requests
            pass

    def report(self) -> StepReport:
        report = self.scheduler.take_report()
        self.reports += 1
        assert report.seq == self.reports
        for gateway_id, deltas in report.deltas.items():
            for delta in deltas:
                self._take_delta(gateway_id, delta)
        for event in report.block_events:
            self._take_event(event)
        self.last = report
        return report

    def check(self) -> None:
        """Checks invariants, and overwrites all free memory, except for memory that a late rank
        still copies before the next Plan may overwrite it.
        """
        host = self.scheduler.state.cache.host
        late = [loads for loads in self.device.loads if not loads.is_done]
        slots = [] if host is None else host._slots.free
        busy = {slot for loads in late for slot in loads.slots}
        snapshots = self.scheduler.state.cache._snapshots
        in_host = None if snapshots is None else snapshots.host
        busy_snapshots = {number for loads in late for number in loads.snapshots}
        free_snapshots = [] if in_host is None else in_host._pool.free
        self.device.poison(
            self.free_pages(),
            [slot for slot in slots if slot not in busy],
            self.free_snapshots(),
            [number for number in free_snapshots if number not in busy_snapshots],
        )
        if self.checked:
            self.scheduler.check_invariants()

    def free_pages(self) -> list[int]:
        """Pages that may be overwritten now."""
        cache = self.scheduler.state.cache
        # Pages that tests evict needlessly are free, but still waiting to be stored.
        stored = set() if cache.host is None else set(cache.host._stores.pages)
        for plan in self.device.in_flight:
            for copies in (plan.stores, plan.load_stores):
                stored.update(() if copies is None else copies.pages)
        for loads in self.device.loads:
            if not loads.is_done:
                stored.update(loads.pages)
        return [page for page in cache._pages.free if page not in stored]

    def free_snapshots(self) -> list[int]:
        """Snapshots that may be overwritten now, as in `free_pages`."""
        snapshots = self.scheduler.state.cache._snapshots
        if snapshots is None:
            return []
        stored = set() if snapshots.host is None else set(snapshots.host._stores.pages)
        for plan in self.device.in_flight:
            copies = plan.host_state_stores
            stored.update(() if copies is None else copies.pages)
        return [snapshot for snapshot in snapshots._pool.free if snapshot not in stored]

    def finished(self, request_id: str, attempt: int = 0) -> Outcome:
        """The outcome of a request, which must equal its outcome when it runs alone."""
        outcome = self.outcomes[request_id, attempt]
        tokens, reason, stop = expected_output(outcome.submit, self.config)
        assert outcome.tokens == tokens
        assert outcome.finish_reason == reason
        assert outcome.stop_reason == stop
        is_pooled = outcome.submit.sampling.pooling is not None
        content = prompt_content(outcome.submit).to_bytes(8, "little")
        assert outcome.pooled == (content if is_pooled else None)
        return outcome

    def check_drained(self) -> None:
        """Checks that every page is either free or cached, and the mirror contains exactly the
        cached blocks."""
        cache = self.scheduler.state.cache
        cache.check_invariants([])
        tree = cache._tree
        assert cache._pages.num_fenced == 0
        assert cache._slots.num_free == self.config.max_num_seqs
        assert cache.num_available == self.config.num_pages - 1
        nodes = [node for node in tree.nodes() if not node.is_root]
        on_device = [page for node in nodes if not node.on_host for page in node.pages]
        assert tree.num_evictable == len(on_device)
        for mirror, on_host in ((self.mirror, False), (self.host_mirror, True)):
            cached = [value for n in nodes if n.on_host == on_host for value in n.hashes]
            assert sorted(cached) == sorted(mirror)
        if cache.host is not None:
            assert cache.host._slots.num_fenced == 0
            held = [entry for node in nodes if node.on_host for entry in node.pages]
            if cache._host_blocks is not None:
                held = cache._host_blocks.slots(held)
            assert cache.host.num_free + len(held) == self.config.num_host_pages
            assert cache.host.totals.num_used == len(held)

    def _take_delta(self, gateway_id: str, delta: TokenDelta) -> None:
        outcome = self.outcomes[delta.request_id, delta.attempt]
        assert outcome.submit.gateway_id == gateway_id
        assert outcome.finish_reason is None, "news after the end"
        first = not outcome.tokens and outcome.num_cached == -1
        if not first:
            assert delta.num_cached_tokens == -1
        outcome.num_cached = max(outcome.num_cached, delta.num_cached_tokens)
        assert delta.token_ids or delta.finish_reason is not None
        outcome.tokens += delta.token_ids
        outcome.finish_reason = delta.finish_reason
        outcome.stop_reason = delta.stop_reason
        outcome.rejection = delta.rejection
        outcome.pooled = delta.pooled

    def _take_event(self, event: BlockEvent) -> None:
        mirror = self.host_mirror if event.tier == "host" else self.mirror
        if isinstance(event, BlockStored):
            parent = event.parent_hash
            for value in event.block_hashes:
                known = parent in mirror or (event.tier == "host" and parent in self.mirror)
                assert parent is None or known, "stored before its parent"
                assert value not in mirror
                mirror[value] = parent
                parent = value
        else:
            for value in event.block_hashes:
                other = self.mirror if event.tier == "host" else self.host_mirror
                if value not in other:
                    below = value in mirror.values() or value in other.values()
                    assert not below, "removed before its child"
                del mirror[value]
