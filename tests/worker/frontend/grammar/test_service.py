"""Grammars in the frontend: the cost of rejections, and failures that are not caused by the
grammar."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from tests.support.worker import played_engine
from worker.core.grammar.base import MAX_MESSAGE_BYTES, GrammarTooHeavy
from worker.frontend.grammar import process, service
from worker.frontend.grammar.service import GrammarService
from worker.protocol.messages import CompiledGrammar, Rejection, Submit
from worker.protocol.sampling import SamplingParams
from worker.protocol.structured import MAX_GRAMMAR_BYTES, StructuredOutputsParams

pytestmark = pytest.mark.slow

INFO = msgspec.structs.replace(
    played_engine.INFO, model="deploy/models/demo", vocab_size=2560, block_hash_salt="demo"
)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, starting a process takes a while."""
    monkeypatch.setattr(service, "PATIENCE_S", 60.0)


@pytest.fixture
async def grammars() -> AsyncIterator[GrammarService]:
    grammars = GrammarService(INFO)
    yield grammars
    grammars.close()


async def compile_grammar(
    grammars: GrammarService, **params: Any
) -> tuple[CompiledGrammar | None, Rejection | None]:
    """Outcome of one request."""
    params_of = SamplingParams(seed=1, structured_outputs=StructuredOutputsParams(**params))
    submit = Submit(request_id="r", gateway_id="g", prompt=bytes(4), sampling=params_of)
    compiled, rejections = await grammars.compile([submit])
    return next(iter(compiled.values()), None), next(iter(rejections), None)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def compilers(grammars: GrammarService) -> list[int]:
    """Process ids of both compilers, idle."""
    number = 0
    while len(grammars._compilers) < 2:
        number += 1
        await asyncio.gather(*(compile_grammar(grammars, regex=f"a{{{number}}}{c}") for c in "xyz"))
    await until(lambda: len(grammars._idle) == 2)
    for compiler in grammars._compilers:
        compiler.seconds = 0.5
    return [compiler._process.pid for compiler in grammars._compilers if compiler._process]


def resume(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it has been replaced
            os.kill(pid, signal.SIGCONT)


@pytest.mark.usefixtures("frozen_heap")
async def test_a_refusal_only_keeps_its_short_message(grammars: GrammarService) -> None:
    await compile_grammar(grammars, regex="a")
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(3):
            text = f"({number}" + "a" * (MAX_GRAMMAR_BYTES - 2)
            _, rejection = await compile_grammar(grammars, regex=text)
            assert rejection is not None
            assert rejection.status == 400
            assert "parenthesis" in rejection.message
            assert len(rejection.message.encode()) <= MAX_MESSAGE_BYTES
            del text, rejection
        # Neither their grammars nor error messages of the library are kept; the last one is freed
        # with the task that has returned its rejection.
        async with asyncio.timeout(120):
            while tracemalloc.get_traced_memory()[0] - before >= 2**18:
                await asyncio.sleep(0.01)
                gc.collect()
    finally:
        tracemalloc.stop()
    assert grammars._cached_bytes > 3 * 500, "they count with their size"


async def test_the_cache_is_bounded_by_the_bytes_of_refusals(
    grammars: GrammarService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "CACHE_BYTES", 2048)
    for number in range(20):
        await compile_grammar(grammars, regex=f"({number}" + "é" * 2000)
    assert grammars._cached_bytes <= 2048
    assert 0 < len(grammars._cache) <= 2


async def test_a_schema_is_compiled_when_stopped_compilers_resume(grammars: GrammarService) -> None:
    pids = await compilers(grammars)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    try:
        first = asyncio.create_task(compile_grammar(grammars, json=SCHEMA))
        # More than the capacity of a pipe.
        large = asyncio.create_task(
            compile_grammar(grammars, json=SCHEMA | {"title": "x" * 200_000})
        )
        await until(lambda: time.monotonic() > began + 3 * 0.5 or first.done())
    finally:
        resume(pids)
    compiled, rejection = await first
    assert rejection is None
    assert compiled is not None
    assert (await compile_grammar(grammars, json=SCHEMA)) == (compiled, None)
    assert (await large)[1] is None


async def test_a_hung_compiler_is_replaced_without_a_verdict(
    grammars: GrammarService, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pid in (pids := await compilers(grammars)):
        os.kill(pid, signal.SIGSTOP)
    with monkeypatch.context() as patched:
        patched.setattr(process, "STARVED", 1, raising=False)
        _, rejection = await compile_grammar(grammars, json=SCHEMA)
    assert rejection is not None
    assert rejection.status == 503, "another worker may serve it"
    assert "CPU time" in rejection.message
    resume(pids)
    compiled, rejection = await compile_grammar(grammars, json=SCHEMA)
    assert rejection is None
    assert compiled is not None


async def test_a_killed_compiler_fails_no_request(grammars: GrammarService) -> None:
    for pid in (pids := await compilers(grammars)):
        os.kill(pid, signal.SIGSTOP)  # so that it is killed while compiling
    work = asyncio.create_task(compile_grammar(grammars, json=SCHEMA))
    await until(lambda: len(grammars._idle) == 1)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    compiled, rejection = await work
    assert rejection is None
    assert compiled is not None


async def test_requests_do_not_wait_longer_than_their_gateways(
    grammars: GrammarService, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pid in (pids := await compilers(grammars)):
        os.kill(pid, signal.SIGSTOP)
    with monkeypatch.context() as patched:
        patched.setattr(service, "PATIENCE_S", 0.2)
        _, rejection = await compile_grammar(grammars, json=SCHEMA)
    assert rejection is not None
    assert rejection.status == 503
    resume(pids)
    compiled, _ = await compile_grammar(grammars, json=SCHEMA)
    assert compiled is not None, "it was compiled anyway"


class SlowCompiler:
    """Simulates a compiling process whose grammars exceed a limit until configured otherwise."""

    vocabulary = None
    num_compiled = 0
    is_heavy = False

    def __init__(self, setting: object) -> None:
        self.setting = setting

    def compile(self, params: StructuredOutputsParams) -> CompiledGrammar:
        SlowCompiler.num_compiled += 1
        time.sleep(0.02)  # so that requests overlap
        if self.is_heavy:
            raise GrammarTooHeavy("structured_outputs: json takes longer than 1.5 s")
        return CompiledGrammar("key", "xgrammar", "payload")

    def close(self) -> None:
        pass


async def test_a_limit_is_not_a_verdict_and_attempts_are_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "GrammarCompiler", SlowCompiler)
    monkeypatch.setattr(SlowCompiler, "num_compiled", 0)
    monkeypatch.setattr(SlowCompiler, "is_heavy", True)
    grammars = GrammarService(INFO)
    answers = await asyncio.gather(*(compile_grammar(grammars, json=SCHEMA) for _ in range(16)))
    assert [rejection and rejection.status for _, rejection in answers] == [400] * 16
    assert SlowCompiler.num_compiled == 1
    assert not grammars._cache
    monkeypatch.setattr(SlowCompiler, "is_heavy", False)
    compiled, rejection = await compile_grammar(grammars, json=SCHEMA)
    assert (compiled is not None, rejection) == (True, None)
    grammars.close()


async def test_waiting_texts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "GrammarCompiler", SlowCompiler)
    monkeypatch.setattr(service, "WAITING_CHARACTERS", 100_000)
    grammars = GrammarService(INFO)
    requests = (compile_grammar(grammars, regex=f"{number}" + "a" * 30_000) for number in range(10))
    answers = await asyncio.gather(*requests)
    statuses = [rejection and rejection.status for _, rejection in answers]
    assert statuses.count(503) == 6
    assert grammars._waiting_characters == 0
    grammars.close()
