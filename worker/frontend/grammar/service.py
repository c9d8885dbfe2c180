"""Grammar service of a frontend: compiles each grammar once and caches the result."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from worker.core.grammar.base import GrammarError, GrammarTooHeavy
from worker.frontend.grammar.process import (
    CompilerFailure,
    GrammarCompiler,
    grammar_key,
    setting_of,
)
from worker.protocol.messages import (
    CompiledGrammar,
    EngineInfo,
    Rejection,
    Submit,
    SubmitBatch,
    Vocabulary,
)
from worker.protocol.sampling import SamplingParams
from worker.protocol.structured import StructuredOutputsParams

logger = logging.getLogger(__name__)

NUM_PROCESSES = 2
"""Number of compiling processes: more than one, so that a slow grammar does not block all
others."""
CACHE_BYTES = 64 * 2**20
"""Maximum total size of cached results in bytes."""
MAX_CACHED = 4096
"""Maximum number of cached results. Final rejections are cached, too, so that an invalid grammar is
not compiled repeatedly."""
MAX_WAITING = 4096
"""Maximum number of grammars being compiled or queued; further requests are rejected with HTTP
503."""
WAITING_CHARACTERS = 64 * 2**20
"""Maximum total length in characters of the grammars being compiled or queued; further requests are
rejected with HTTP 503."""
PATIENCE_S = 8.0
"""Time in seconds after which a request is rejected with HTTP 503 if its grammar is not compiled
yet. The result is cached for later requests; a compilation that has not started is cancelled.
Gateways wait slightly longer."""


class GrammarRejection(NamedTuple):
    """Reason why a grammar was not compiled."""

    message: str
    status: int
    """HTTP status: 400 if the grammar is invalid, 503 if another worker may serve it."""
    is_final: bool
    """Whether compiling the grammar again would give the same result."""


class GrammarService:
    """Compiles grammars for a worker's engines. For use on one event loop.

    Args:
        info: the first engine; later ones have the same model.
    """

    def __init__(self, info: EngineInfo) -> None:
        self._setting = setting_of(info)
        self._threads = ThreadPoolExecutor(NUM_PROCESSES, thread_name_prefix="grammar")
        self._idle: deque[GrammarCompiler] = deque()
        self._compilers: list[GrammarCompiler] = []
        self._tasks: dict[str, asyncio.Task[CompiledGrammar | GrammarRejection]] = {}
        """Running compilations by key: one per grammar, shared by all requests for it."""
        self._waiting_characters = 0
        self._cache: OrderedDict[str, CompiledGrammar | GrammarRejection] = OrderedDict()
        # HAZARD: exceptions must not be cached: their tracebacks would keep frames and the grammar
        # alive.
        self._cached_bytes = 0
        self._vocabulary: Vocabulary | None = None
        self._sent: dict[str, None] = {}
        """Keys of the grammars that were sent to the current engine."""
        self._dropped: list[str] = []
        """Keys of grammars that the engine may drop."""

    def engine_changed(self) -> None:
        """Resets the state for a new engine, which has no grammars yet."""
        self._sent.clear()
        self._dropped.clear()

    async def compile(
        self, submits: Sequence[Submit]
    ) -> tuple[dict[str, CompiledGrammar], list[Rejection]]:
        """Compiles the grammars of `submits`.

        In submits with compiled grammars, the grammar's text is replaced with its key.

        Returns:
            Compiled grammars by key, and a rejection for each submit whose grammar was not
            compiled.
        """
        structured = [s for s in submits if s.sampling.structured_outputs is not None]
        # Completions of one request share their parameters and therefore the result.
        samplings = {id(submit.sampling): submit.sampling for submit in structured}
        verdicts = await asyncio.gather(*map(self._verdict, samplings.values()))
        found = {
            key: (verdict, sampling.amended(structured_outputs=None))
            for (key, sampling), verdict in zip(samplings.items(), verdicts, strict=True)
        }
        grammars: dict[str, CompiledGrammar] = {}
        rejections = []
        for submit in structured:
            verdict, rest = found[id(submit.sampling)]
            if isinstance(verdict, CompiledGrammar):
                grammars[verdict.key] = verdict
                submit.grammar, submit.sampling = verdict.key, rest
                continue
            rejections.append(
                Rejection(
                    request_id=submit.request_id,
                    attempt=submit.attempt,
                    message=verdict.message,
                    status=verdict.status,
                    param="structured_outputs",
                    is_final=verdict.is_final,
                )
            )
        return grammars, rejections

    def attach(self, batch: SubmitBatch, grammars: Mapping[str, CompiledGrammar]) -> None:
        """Adds grammars that the engine does not have yet to a batch, just before it is sent."""
        if not batch.submits:
            return
        keys = dict.fromkeys(submit.grammar for submit in batch.submits if submit.grammar)
        missing = [key for key in keys if key not in self._sent]
        if missing and not self._sent:
            batch.vocabulary = self._vocabulary
        batch.grammars = [grammars[key] for key in missing]
        batch.dropped_grammars, self._dropped = self._dropped, []
        self._sent.update(dict.fromkeys(missing))

    def close(self) -> None:
        """Stops the compiling processes."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for compiler in self._compilers:
            compiler.close()

    async def _verdict(self, sampling: SamplingParams) -> CompiledGrammar | GrammarRejection:
        params = sampling.structured_outputs
        assert params is not None, "only for structured outputs"
        key = grammar_key(params)
        cached = self._cache.get(key)
        if cached is not None:
            self._cache.move_to_end(key)
            return cached
        task = self._tasks.get(key)
        if task is None:
            is_crowded = len(self._tasks) >= MAX_WAITING
            if is_crowded or self._waiting_characters >= WAITING_CHARACTERS:
                return _later("too many grammars are being compiled")
            task = asyncio.create_task(self._compile(key, params))
            self._tasks[key] = task
            self._waiting_characters += len(params.text)
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await asyncio.shield(task)
        except TimeoutError:
            return _later("the grammar is still being compiled")

    async def _compile(
        self, key: str, params: StructuredOutputsParams
    ) -> CompiledGrammar | GrammarRejection:
        loop = asyncio.get_running_loop()
        deadline = time.monotonic() + PATIENCE_S
        try:
            verdict = await loop.run_in_executor(
                self._threads, self._compile_in_thread, params, deadline
            )
        finally:
            del self._tasks[key]
            self._waiting_characters -= len(params.text)
        if isinstance(verdict, CompiledGrammar) or verdict.is_final:
            self._keep(key, verdict)
        return verdict

    def _compile_in_thread(
        self, params: StructuredOutputsParams, deadline: float
    ) -> CompiledGrammar | GrammarRejection:
        if time.monotonic() > deadline:
            return _later("too many grammars are being compiled")
        if self._idle:
            compiler = self._idle.pop()
        else:
            compiler = GrammarCompiler(self._setting)
            self._compilers.append(compiler)
        try:
            compiled = compiler.compile(params)
        except GrammarError as error:
            return GrammarRejection(
                str(error), 400, is_final=not isinstance(error, GrammarTooHeavy)
            )
        except CompilerFailure as failure:
            return _later(str(failure))
        finally:
            self._idle.append(compiler)
        self._vocabulary = compiler.vocabulary
        return compiled

    def _keep(self, key: str, verdict: CompiledGrammar | GrammarRejection) -> None:
        self._cache[key] = verdict
        self._cached_bytes += _size(key, verdict)
        while self._cached_bytes > CACHE_BYTES or len(self._cache) > MAX_CACHED:
            oldest, evicted = self._cache.popitem(last=False)
            self._cached_bytes -= _size(oldest, evicted)
            if oldest in self._sent:
                del self._sent[oldest]
                self._dropped.append(oldest)


def _later(problem: str) -> GrammarRejection:
    """Rejection with HTTP 503, for a reason unrelated to the grammar."""
    return GrammarRejection(f"structured_outputs: {problem}: retry later", 503, is_final=False)


def _size(key: str, verdict: CompiledGrammar | GrammarRejection) -> int:
    """Size of a cached result in bytes, without per-object overhead (which MAX_CACHED limits)."""
    text = verdict.payload if isinstance(verdict, CompiledGrammar) else verdict.message
    return sys.getsizeof(key) + sys.getsizeof(text)
