"""In-process engine that a benchmark drives step by step, and measurements of its runs."""

from __future__ import annotations

import itertools
import math
import shutil
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple, Self

import msgspec
import numpy as np

from worker.config import EngineConfig
from worker.core.engine import EngineCore
from worker.core.executor_factory import create_executor, uses_cuda
from worker.core.timeline import StepRecord
from worker.models.config.model_config import load_model_config
from worker.protocol.blocks import TOKEN_BYTES
from worker.protocol.diffusion import BlockTotals
from worker.protocol.messages import (
    Abort,
    EngineInfo,
    LoadSnapshot,
    StepReport,
    Submit,
    SubmitBatch,
)
from worker.protocol.sampling import SamplingParams
from worker.protocol.speculation import SpeculationTotals

GATEWAY = "bench"
"""Gateway id of a benchmark's requests."""
KEPT_RECORDS = 5
"""Number of timeline records kept per decode run."""
_SETTLING_STEPS = 4
"""Number of unmeasured steps after every request has its first token."""


class Request(NamedTuple):
    """A benchmark's request to an engine."""

    prompt: bytes
    """Token ids of the prompt, little-endian int32."""
    sampling: SamplingParams
    cache_salt: str = ""
    """Prefix cache salt: only requests with the same salt share blocks."""
    grammar: str = ""
    """Key of a grammar that was added to the engine; empty if unconstrained."""


@dataclass(kw_only=True, slots=True)
class Answer:
    """Answer to a request. Times are seconds since the start of its run."""

    num_prompt: int
    """Number of prompt tokens."""
    token_ids: list[int] = field(default_factory=list)
    """Generated tokens."""
    num_rows: int = 0
    """Number of steps in which tokens were generated."""
    first_s: float = math.nan
    """Time of the first token."""
    last_s: float = math.nan
    """Time of the last token."""
    rounds: list[int] = field(default_factory=list)
    """Denoising passes per block, for block-diffusion models."""

    @property
    def tpot_s(self) -> float:
        """Seconds per token after the first."""
        return (self.last_s - self.first_s) / max(len(self.token_ids) - 1, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """Measurements of one run, in which an engine answers all requests."""

    answers: Sequence[Answer]
    """Answers in the order of the requests."""
    elapsed_s: float
    """Seconds from the start of the clock to the last token."""
    before: LoadSnapshot
    """Load report of the engine before the run; its counters accumulate over runs."""
    after: LoadSnapshot
    """Load report after the run."""

    @property
    def num_tokens(self) -> int:
        """Number of generated tokens."""
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def num_rows(self) -> int:
        """Number of requests that received tokens in a step, summed over all steps."""
        return sum(answer.num_rows for answer in self.answers)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second over the run."""
        return self.num_tokens / self.elapsed_s

    def growth(self, name: str) -> float:
        """Increase of a load-report counter, such as `blocks.num_forwards`, during the run."""
        read = attrgetter(name)
        return float(read(self.after) - read(self.before))


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeTurn:
    """Decode steps of a fixed number of requests. Times are means per step, in microseconds."""

    wall_us: float
    """Wall time."""
    phases_us: dict[str, float]
    """Time of each phase, keyed by StepTimes' field names."""
    records: tuple[StepRecord, ...]
    """Timeline of the last measured steps."""

    @property
    def rank_us(self) -> float:
        """Rank 0's time, including preparation."""
        return self.compute_us + self.phases_us["prepare"]

    @property
    def compute_us(self) -> float:
        """Rank 0's time for the forward pass and sampling."""
        return self.phases_us["forward"] + self.phases_us["sample"]

    @property
    def idle_us(self) -> float:
        """Time from the end of sampling to the next forward pass: an upper bound on the device's
        idle time."""
        return self.phases_us["bubble"] + self.phases_us["prepare"]


class BenchEngine:
    """An engine with its ranks, started on creation and stopped by `close` or by the `with` block.

    Args:
        config: configuration of the engine.
        request_tokens: maximum number of tokens per request. If given, the KV cache on a CUDA
            device is sized for `max_num_seqs` such requests unless `config` sets its size: several
            engines share the device, and none may use all of its memory. `max_num_seqs` is 64
            unless `config` sets it, so that the load is the same on every device.
    """

    def __init__(self, config: EngineConfig, *, request_tokens: int | None = None) -> None:
        cache, max_num_seqs = config.cache, config.scheduling.max_num_seqs or 64
        if request_tokens is not None and uses_cuda(config) and cache.kv_cache_tokens is None:
            block_size = load_model_config(config.checkpoint, weights=False).block_size
            page_size = config.with_page_size(block_size).cache.page_size
            tokens = max_num_seqs * (-(-request_tokens // page_size) + 1) * page_size
            config = config.with_options(max_num_seqs=max_num_seqs, kv_cache_tokens=tokens)
        self.config = config
        self._directory = tempfile.mkdtemp(prefix="rf-")
        self._executor = create_executor(config, self._directory, spawn_peers=True)
        try:
            self.core = EngineCore(config, self._executor.start(), self._executor, time.monotonic)
        except BaseException:
            self.close()
            raise
        self._ids = itertools.count()
        self._encoder = msgspec.msgpack.Encoder()

    @property
    def info(self) -> EngineInfo:
        """Model and limits of the engine, as loaded."""
        return self.core.info

    def close(self) -> None:
        """Stops the engine's ranks."""
        self._executor.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, requests: Iterable[Request], *, at_once: int | None = None) -> Turn:
        """Answers all requests. The clock starts when the first requests have been queued.

        Args:
            requests: requests in order of arrival.
            at_once: maximum number of unfinished requests: when one finishes, the next is queued.
                None queues all at the start.
        """
        waiting, before = iter(requests), self._load()
        answers: dict[str, Answer] = {}
        num_running = self._submit(itertools.islice(waiting, at_once), answers)
        while self.core.grammars.num_due:
            self.core.take_grammars(wait=True)
        start = now = time.monotonic()
        while num_running:
            report = self.step()
            now = time.monotonic()
            for delta in report.deltas.get(GATEWAY, ()):
                assert delta.error is None, delta.error
                answer = answers[delta.request_id]
                if delta.token_ids:
                    if not answer.token_ids:
                        answer.first_s = now - start
                    answer.last_s = now - start
                    answer.num_rows += 1
                    answer.token_ids += delta.token_ids
                if self.info.block_size > 1:
                    answer.rounds.append(delta.num_rounds - sum(answer.rounds))
                if delta.finish_reason is not None:
                    num_running += self._submit(itertools.islice(waiting, 1), answers) - 1
        self._drain()
        return Turn(
            answers=tuple(answers.values()),
            elapsed_s=now - start,
            before=before,
            after=self._load(),
        )

    def decode(self, running: int, number: int, *, steps: int, input_len: int) -> DecodeTurn:
        """Prefills requests, then times steps in which all of them decode.

        Args:
            running: number of requests.
            number: number of the run, which seeds the prompts.
            steps: number of measured steps.
            input_len: tokens per prompt.
        """
        sampling = SamplingParams(
            temperature=0.0, max_tokens=decode_tokens(steps, 0), ignore_eos=True, seed=0
        )
        answers: dict[str, Answer] = {}
        self._submit(
            (
                Request(random_prompt((number, index), self.info.vocab_size, input_len), sampling)
                for index in range(running)
            ),
            answers,
        )
        waiting = set(answers)
        while waiting:
            waiting -= {delta.request_id for delta in self.core.step().deltas.get(GATEWAY, ())}
        self._steps(_SETTLING_STEPS)
        before, start = self.core.timeline.totals(), time.monotonic()
        self._steps(steps)
        elapsed, after = time.monotonic() - start, self.core.timeline.totals()
        records = tuple(self.core.timeline.records)[-KEPT_RECORDS:]
        for request_id in answers:
            self.core.abort(Abort(request_id=request_id))
        self._drain()
        count = after.num_steps - before.num_steps
        assert count == steps, f"{count} steps were completed in {steps} turns"
        phases = {
            name: (value - getattr(before, name)) / steps * 1e6
            for name, value in msgspec.structs.asdict(after).items()
            if name != "num_steps"
        }
        return DecodeTurn(wall_us=elapsed / steps * 1e6, phases_us=phases, records=records)

    def step(self) -> StepReport:
        """Runs a step of the engine and encodes its report, as a worker does for its frontend."""
        report = self.core.step()
        self._encoder.encode(report)
        return report

    def _submit(self, requests: Iterable[Request], answers: dict[str, Answer]) -> int:
        """Queues requests and adds an answer for each; returns their number."""
        before = len(answers)
        for request in requests:
            submit = Submit(
                request_id=str(next(self._ids)),
                gateway_id=GATEWAY,
                prompt=request.prompt,
                sampling=request.sampling,
                cache_salt=request.cache_salt,
                grammar=request.grammar,
            )
            answers[submit.request_id] = Answer(num_prompt=len(request.prompt) // TOKEN_BYTES)
            self.core.receive(SubmitBatch(submits=[submit]))
        return len(answers) - before

    def _steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def _drain(self) -> None:
        while self.core.has_work():
            self.core.step()

    def _load(self) -> LoadSnapshot:
        """Copy of the load report, since its counters keep changing; parts that the engine does not
        report are zero."""
        encoded = self._encoder.encode(self.core.report().load)
        load = msgspec.msgpack.decode(encoded, type=LoadSnapshot)
        load.speculation = load.speculation or SpeculationTotals()
        load.blocks = load.blocks or BlockTotals()
        return load


class Engines:
    """Engines keyed by configuration. Each is started on first use; all are closed on exit."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._started: dict[EngineConfig, BenchEngine] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def get(self, config: EngineConfig, *, request_tokens: int | None = None) -> BenchEngine:
        """Engine with this configuration; see BenchEngine."""
        if config not in self._started:
            engine = BenchEngine(config, request_tokens=request_tokens)
            self._started[config] = self._stack.enter_context(engine)
        return self._started[config]


def decode_tokens(steps: int, input_len: int) -> int:
    """Upper bound on the number of tokens of each request in `BenchEngine.decode`.

    Requests that get their first token early keep decoding until every request has one.
    """
    return input_len + 2 * steps + 64


def random_prompt(seed: tuple[int, ...], vocab_size: int, length: int) -> bytes:
    """Random token ids as little-endian int32; equal seeds give equal prompts."""
    return np.random.default_rng(seed).integers(0, vocab_size, length).astype("<i4").tobytes()
