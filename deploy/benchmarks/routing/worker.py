"""Simulated worker: the real scheduler and prefix cache, but no computation."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from deploy.benchmarks.routing.workload import FleetShape
from worker.core.scheduler import Scheduler, SchedulerConfig
from worker.frontend.attachment import CacheMirror
from worker.plan.plan import AdapterReadResult, PageCopies, Plan, StepResult
from worker.protocol.admission import AdmissionOptions
from worker.protocol.messages import (
    PROTOCOL_VERSION,
    AttachSnapshot,
    EngineInfo,
    LoadSnapshot,
    StepReport,
    StepShape,
    Submit,
)

SALT = "simulated"
TOKEN = 7
"""Token id that simulated workers generate by default."""
IDLE_S = 0.02
"""Maximum time in seconds that a step without rows waits for an adapter read, as in
`worker.rank.adapters`."""
_LOAD_TOKEN_S = 5e-6
"""Seconds to load one token's keys and values from host memory, while steps run."""
_STORE_TOKEN_S = 1e-6
"""Seconds that storing one token in host memory delays a step."""


@dataclass(slots=True)
class _Loads:
    """Unfinished loads of a Plan."""

    seq: int
    left_s: float
    """Remaining copy time in seconds."""


class SimWorker:
    """Simulated worker group at overlap depth 0. The caller advances time with `begin` and
    `finish`.

    Args:
        worker_id: id of the worker.
        fleet: limits and step costs.
        slowness: factor for the step times.
        script: token ids of answers, repeated. A token depends only on its position in the
            sequence, so that another worker resumes it identically.
        clock: the scheduler's clock.
    """

    def __init__(
        self,
        worker_id: str,
        fleet: FleetShape,
        slowness: float = 1.0,
        *,
        script: Sequence[int] = (TOKEN,),
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.worker_id = worker_id
        self._clock = clock
        self._script = tuple(script)
        self.epoch = 0
        self.draining = False
        self.up = False
        """Whether the worker is running."""
        self.open: dict[str, int] = {}
        """Attempt numbers of unfinished requests, keyed by request id."""
        self._costs = fleet.costs
        self._slowness = slowness
        self._adapter_read_s = fleet.adapter_read_s
        self._config = SchedulerConfig(
            max_num_seqs=fleet.max_num_seqs,
            max_num_batched_tokens=fleet.max_num_batched_tokens,
            max_model_len=fleet.num_pages * fleet.page_size,
            page_size=fleet.page_size,
            num_pages=fleet.num_pages + 1,
            block_hash_salt=SALT,
            max_queued_requests=0,
            num_host_pages=fleet.num_host_pages,
            max_loras=fleet.max_loras,
            max_cpu_loras=fleet.max_cpu_loras,
            admission=AdmissionOptions(default_tpot_ms=fleet.default_tpot_ms),
        )
        self.info = EngineInfo(
            model="simulated",
            max_model_len=self._config.max_model_len,
            max_total_tokens=fleet.num_pages * fleet.page_size,
            vocab_size=2**31 - 1,
            page_size=fleet.page_size,
            max_num_seqs=fleet.max_num_seqs,
            eos_token_ids=[],
            block_hash_salt=SALT,
            max_num_batched_tokens=fleet.max_num_batched_tokens,
        )
        self.start()

    def start(self) -> None:
        """Starts a new epoch with an empty cache."""
        self.epoch += 1
        self.up = True
        self.draining = False
        self._scheduler = Scheduler(self._config, self._clock)
        self._mirror = CacheMirror()
        self._plan: Plan | None = None
        self._step_s = self._load_s = 0.0
        self._loads: deque[_Loads] = deque()
        self._reads: deque[tuple[int, float]] = deque()
        """Keys of adapters that are being read in sequence, and the time at which each read
        ends."""
        self._num_submits = 0
        self.open.clear()
        self.load = LoadSnapshot(
            num_free_pages=self._config.num_pages - 1,
            num_total_pages=self._config.num_pages - 1,
            max_num_seqs=self._config.max_num_seqs,
        )

    def submit(self, submit: Submit) -> int:
        """Queues a request; returns its ordinal number."""
        self._num_submits += 1
        self.open[submit.request_id] = submit.attempt
        self._scheduler.add(submit)
        return self._num_submits

    def abort(self, request_id: str, attempt: int = 0) -> None:
        """Aborts a request if it is unfinished."""
        self.open.pop(request_id, None)
        self._scheduler.abort(request_id, attempt)

    def begin(self) -> float | None:
        """Begins a step; returns its duration in seconds, or None if a step is running, there is no
        work, or the worker is down."""
        if self._plan is not None or not self.up:
            return None
        self._plan = self._scheduler.schedule()
        if self._plan is None:
            return None
        plan, size = self._plan, self.info.page_size
        self._step_s = self._costs.step(_shape(plan)) * self._slowness
        self._read(plan)
        if not plan.rows:
            return min(max(self._reads[0][1] - self._clock(), 0.0), IDLE_S)
        if plan.loads is not None:
            num_stored = _num_copied(plan.load_stores)
            load_s = len(plan.loads.pages) * _LOAD_TOKEN_S + num_stored * _STORE_TOKEN_S
            self._loads.append(_Loads(plan.seq, load_s * size))
        self._load_s = 0.0
        waits_s = self._copy(plan.loaded, inf)
        self._copy(plan.seq, self._step_s)
        return self._step_s + waits_s + _num_copied(plan.stores) * size * _STORE_TOKEN_S

    def finish(self) -> StepReport:
        """Finishes the running step; returns its report."""
        plan = self._plan
        assert plan is not None, "no step was begun"
        self._plan = None
        script = self._script
        drawn = [
            script[(row.start + row.length) % len(script)] for row in plan.rows if row.num_samples
        ]
        self._scheduler.apply(
            StepResult(
                *(plan.seq, drawn, self._step_s * 1e3),
                load_ms=self._load_s * 1e3,
                loading=self._loads[0].seq if self._loads else 0,
                adapters_read=self._take_read(),
            )
        )
        report = self._scheduler.take_report()
        self.load = report.load
        self._mirror.apply(report.block_events)
        for deltas in report.deltas.values():
            for delta in deltas:
                if delta.finish_reason is not None:
                    self.open.pop(delta.request_id, None)
        return report

    def _read(self, plan: Plan) -> None:
        """Starts the Plan's adapter reads."""
        for read in plan.adapter_reads:
            begin = self._reads[-1][1] if self._reads else self._clock()
            self._reads.append((read.key, begin + self._adapter_read_s))

    def _take_read(self) -> list[AdapterReadResult]:
        """Removes and returns the results of finished reads."""
        ended = []
        while self._reads and self._reads[0][1] <= self._clock() + 1e-9:
            ended.append(AdapterReadResult(self._reads.popleft()[0], self._adapter_read_s))
        return ended

    def _copy(self, seq: int, seconds: float) -> float:
        """Continues loads of Plans up to `seq` for at most `seconds`; returns the time used."""
        used_s = 0.0
        while self._loads and self._loads[0].seq <= seq:
            loads = self._loads[0]
            part_s = min(loads.left_s, seconds - used_s)
            loads.left_s -= part_s
            used_s += part_s
            self._load_s += part_s
            if loads.left_s > 0.0:
                break
            self._loads.popleft()
        return used_s

    def snapshot(self) -> AttachSnapshot:
        """First message of an attach stream."""
        return AttachSnapshot(
            PROTOCOL_VERSION,
            self.worker_id,
            self.epoch,
            self.info,
            self._mirror.chains(),
            self.load,
        )


def _num_copied(copies: PageCopies | None) -> int:
    return 0 if copies is None else len(copies.pages)


def _shape(plan: Plan) -> StepShape:
    chunks = [row for row in plan.rows if row.length > 1]
    singles = [row for row in plan.rows if row.length == 1]
    return StepShape(
        seq=plan.seq,
        prefill_tokens=sum(row.length for row in chunks),
        prefill_attended=sum(
            row.length * row.start + row.length * (row.length + 1) // 2 for row in chunks
        ),
        decode_rows=len(singles),
        decode_context=sum(row.start + 1 for row in singles),
    )
