"""Starts, feeds and kills a compiling process. Blocks; imports no grammar library."""

from __future__ import annotations

import hashlib
import os
import select
import subprocess
import sys
import time

import msgspec

from worker.structured.base import GrammarError
from worker.structured.compiling_messages import LENGTH, Job, Setting, Verdict
from worker.wire.messages import CompiledGrammar, EngineInfo, Vocabulary
from worker.wire.structured import StructuredOutputsParams

COMPILE_S = 1.5
"""Time for one grammar. With the answer's way, clients hear of a refusal within two seconds."""
START_S = 60.0
"""Time for loading the vocabulary."""


class CompilerFailure(RuntimeError):
    """The compiling process cannot even start."""


class GrammarCompiler:
    """One compiling process, replaced whenever it had to be killed. For one thread at a time.

    Args:
        setting: what the process compiles for.
        seconds: time for one grammar.
    """

    def __init__(self, setting: Setting, seconds: float = COMPILE_S) -> None:
        self.seconds = seconds
        self.vocabulary: Vocabulary | None = None
        """The process's first word; there from the first `compile` on."""
        self._setting = setting
        self._process: subprocess.Popen[bytes] | None = None
        self._greeted = False
        self._closed = False

    def compile(self, params: StructuredOutputsParams) -> CompiledGrammar:
        """Compiles within the limits of time and memory.

        Raises:
            GrammarError: it cannot be served; the message tells the client why.
            CompilerFailure: no grammar can.
        """
        process = self._ready_process()
        payload = msgspec.msgpack.encode(Job(params))
        deadline = time.monotonic() + self.seconds
        try:
            assert process.stdin is not None
            process.stdin.write(LENGTH.pack(len(payload)) + payload)
            process.stdin.flush()
            frame = self._read_frame(deadline)
        except TimeoutError:
            self._kill()
            self._start()  # ready for the next one
            raise GrammarError(
                f"structured_outputs: {params.kind} takes longer than {self.seconds} s to compile: "
                "simplify it"
            ) from None
        except OSError:
            frame = None
        if frame is None:
            self._kill()
            self._start()
            raise GrammarError(f"structured_outputs: {params.kind} needs too much memory")
        verdict = msgspec.msgpack.decode(frame, type=Verdict)
        if verdict.problem is not None:
            raise GrammarError(
                f"structured_outputs: {params.kind} cannot be used: {verdict.problem}"
            )
        return CompiledGrammar(grammar_key(params), verdict.backend, verdict.payload)

    def close(self) -> None:
        """Ends the process, also from another thread than the one that compiles."""
        self._closed = True
        self._kill()

    def _ready_process(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self._kill()
        process = self._process or self._start()
        if not self._greeted:
            try:
                frame = self._read_frame(time.monotonic() + START_S)
            except TimeoutError:
                frame = None
            if frame is None:
                self._kill()
                raise CompilerFailure("grammars cannot be compiled here: see the worker's log")
            self.vocabulary = msgspec.msgpack.decode(frame, type=Vocabulary)
            self._greeted = True
        return process

    def _start(self) -> subprocess.Popen[bytes]:
        if self._closed:
            raise CompilerFailure("this worker is ending")
        self._greeted = False
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "worker.structured.compiling"),
                msgspec.json.encode(self._setting).decode(),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Threads that a library makes by the core would count against the memory limit.
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"},
        )
        return self._process

    def _read_frame(self, deadline: float) -> bytes | None:
        """One frame; None if the process ended. Raises TimeoutError."""
        head = self._read(LENGTH.size, deadline)
        return None if head is None else self._read(LENGTH.unpack(head)[0], deadline)

    def _read(self, size: int, deadline: float) -> bytes | None:
        assert self._process is not None
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        parts: list[bytes] = []
        while size:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([fd], [], [], left)[0]:
                raise TimeoutError
            part = os.read(fd, min(size, 1 << 20))
            if not part:
                return None
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

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
                except OSError:  # unsent bytes of a process that is gone
                    continue


def setting_of(info: EngineInfo, tokenizer: str | None = None) -> Setting:
    """What grammars for this engine are compiled for."""
    return Setting(
        tokenizer or info.model,
        info.vocab_size,
        info.eos_token_ids,
        info.structured_outputs_backend,
    )


def grammar_key(params: StructuredOutputsParams) -> str:
    """Hash of all that decides what a grammar compiles to."""
    parts = (params.kind, str(params.disable_any_whitespace), params.text)
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()
