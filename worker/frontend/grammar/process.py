"""Grammar compiler: runs a compiling process. Calls are blocking. Does not import grammar
libraries."""

from __future__ import annotations

import hashlib
import os
import select
import signal
import subprocess
import sys
import time

import msgspec

from worker.core.grammar.base import GrammarError, GrammarTooHeavy, shortened
from worker.protocol.analyzed import analyzed
from worker.protocol.frames import FrameReader, frame
from worker.protocol.messages import CompiledGrammar, EngineInfo, Vocabulary
from worker.protocol.structured import StructuredOutputsParams

COMPILE_S = 1.5
"""CPU time limit per grammar in seconds. With a free core, clients get a rejection within two
seconds."""
STARVED = 20
"""Wall-clock limit per grammar, as a multiple of its CPU time limit. A process that gets less than
1/20 of a core counts as hung and is replaced."""
START_S = 60.0
"""Timeout in seconds for a process to start and load the vocabulary."""
_KILLED = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that kill a process from outside, regardless of the grammar."""


class Setting(msgspec.Struct, frozen=True):
    """Settings of a compiling process, passed to it as JSON on the command line."""

    tokenizer: str
    """Checkpoint folder or Hub repository."""
    vocab_size: int
    eos_token_ids: list[int]
    backend: str
    """Name of the backend: auto, xgrammar or guidance."""


class Job(msgspec.Struct, frozen=True):
    """Job of a compiling process: one grammar."""

    params: StructuredOutputsParams
    cpu_s: float
    """CPU time limit of the job in seconds, over all threads."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a Job: the compiled grammar, or a problem."""

    backend: str = ""
    """Backend that compiled the grammar."""
    payload: str = ""
    """Compiled grammar, as input for the `load` method of `backend`."""
    problem: str | None = None
    """Reason why the grammar cannot be used; None if it can."""
    is_final: bool = True
    """Whether compiling the grammar again would give the same result; False if a time or memory
    limit was exceeded."""


class CompilerFailure(RuntimeError):
    """The compiling process failed or was killed; the grammar may be valid."""


class GrammarCompiler:
    """A compiling process, which is replaced whenever it exits or is killed. Must only be used by
    one thread at a time.

    Args:
        setting: settings of the process.
        seconds: CPU time limit per grammar.
    """

    def __init__(self, setting: Setting, seconds: float = COMPILE_S) -> None:
        self.seconds = seconds
        self.vocabulary: Vocabulary | None = None
        """Vocabulary sent by the process; None before the first `compile`."""
        self._setting = setting
        self._process: subprocess.Popen[bytes] | None = None
        self._greeted = False
        self._closed = False

    def compile(self, params: StructuredOutputsParams) -> CompiledGrammar:
        """Compiles a grammar within the time and memory limits.

        Raises:
            GrammarError: the grammar cannot be used; the message is for the client.
            GrammarTooHeavy: a time or memory limit was exceeded.
            CompilerFailure: the process failed.
        """
        job = msgspec.msgpack.encode(Job(params, self.seconds))
        answer = self._run_job(job)
        if _was_killed(answer):
            answer = self._run_job(job)
        if isinstance(answer, int):
            raise self._failure(params.kind, answer)
        verdict = msgspec.msgpack.decode(answer, type=analyzed(Verdict))
        if verdict.problem is not None:
            raise (GrammarError if verdict.is_final else GrammarTooHeavy)(
                shortened(f"structured_outputs: {params.kind} cannot be used: {verdict.problem}")
            )
        return CompiledGrammar(grammar_key(params), verdict.backend, verdict.payload)

    def close(self) -> None:
        """Stops the process; may be called from any thread."""
        self._closed = True
        self._kill()

    def _run_job(self, job: bytes) -> bytes | int:
        """Response of the process, or its exit code if it exited without one."""
        process = self._ready_process()
        deadline = time.monotonic() + self.seconds * STARVED
        try:
            _write(process, frame(job), deadline)
            answer = _read_frame(process, deadline)
        except TimeoutError:
            self._kill()
            self._start()  # start loading for the next job
            raise CompilerFailure(
                f"the compiler process got less than {self.seconds} s of CPU time in "
                f"{self.seconds * STARVED} s"
            ) from None
        except OSError:
            answer = None
        if answer is not None:
            return answer
        self._kill()
        code = process.wait()
        self._start()
        return code

    def _failure(self, kind: str, code: int) -> GrammarError | CompilerFailure:
        """Exception for a process that exited with `code`."""
        if _was_killed(code):
            return CompilerFailure("the compiler process was killed twice")
        if code == -signal.SIGPROF:
            return GrammarTooHeavy(
                f"structured_outputs: {kind} takes longer than {self.seconds} s to compile: "
                "simplify it"
            )
        return GrammarTooHeavy(f"structured_outputs: {kind} needs too much memory: simplify it")

    def _ready_process(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self._kill()
        process = self._process or self._start()
        if not self._greeted:
            try:
                greeting = _read_frame(process, time.monotonic() + START_S)
            except TimeoutError:
                greeting = None
            if greeting is None:
                self._kill()
                raise CompilerFailure("the compiler process failed to start; see the worker's log")
            self.vocabulary = msgspec.msgpack.decode(greeting, type=analyzed(Vocabulary))
            self._greeted = True
        return process

    def _start(self) -> subprocess.Popen[bytes]:
        if self._closed:
            raise CompilerFailure("this worker is shutting down")
        self._greeted = False
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "worker.frontend.grammar.compiling",
                msgspec.json.encode(self._setting).decode(),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            # Libraries start a thread per core, which would count against the memory limit.
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"},
        )
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        return self._process

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except OSError:  # unsent data of a process that has exited
                    continue


def _write(process: subprocess.Popen[bytes], octets: bytes, deadline: float) -> None:
    """Writes to the process. Raises TimeoutError if it stops reading, or OSError if it
    has exited."""
    assert process.stdin is not None
    fd, left = process.stdin.fileno(), memoryview(octets)
    while left:
        _wait(fd, select.POLLOUT, deadline)
        left = left[os.write(fd, left) :]


def _read_frame(process: subprocess.Popen[bytes], deadline: float) -> bytes | None:
    """Reads one frame; returns None if the process has exited. Raises TimeoutError after the
    deadline."""
    assert process.stdout is not None
    fd, reader = process.stdout.fileno(), FrameReader()
    payloads: list[bytes] = []
    while not payloads:
        _wait(fd, select.POLLIN, deadline)
        data = os.read(fd, 1 << 20)
        if not data:
            return None
        payloads = reader.feed(data)
    return payloads[0]


def _wait(fd: int, event: int, deadline: float) -> None:
    """Waits until `fd` is ready for `event` or has been closed. Raises TimeoutError after the
    deadline."""
    poller = select.poll()  # select() does not support descriptors above 1023
    poller.register(fd, event)
    left = deadline - time.monotonic()
    if left <= 0 or not poller.poll(1e3 * left):
        raise TimeoutError


def _was_killed(answer: bytes | int) -> bool:
    """Whether `answer` is the exit code of a process that was killed, either externally or by its
    owner."""
    return isinstance(answer, int) and (answer == 0 or -answer in _KILLED)


def setting_of(info: EngineInfo) -> Setting:
    """Settings of compiling processes for an engine."""
    return Setting(
        info.tokenizer or info.model,
        info.vocab_size,
        info.eos_token_ids,
        info.structured_outputs_backend,
    )


def grammar_key(params: StructuredOutputsParams) -> str:
    """Cache key of a grammar: a hash of everything that affects its compilation."""
    parts = (params.kind, str(params.disable_any_whitespace), params.text)
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()
