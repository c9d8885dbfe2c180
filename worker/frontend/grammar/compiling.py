"""Main module of a compiling process: reads grammars from stdin and writes verdicts to stdout.

Frames are in the format of `worker.protocol.frames`; the first frame written is the Vocabulary. The
process limits its own memory and CPU time.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable

import msgspec
import numpy as np

from worker.core.grammar.base import GrammarBackend, GrammarError, GrammarTooHeavy, shortened
from worker.core.grammar.guidance_backend import GuidanceBackend
from worker.core.grammar.xgrammar_backend import NOT_ENFORCED, XGrammarBackend
from worker.frontend.grammar.process import Job, Setting, Verdict
from worker.niceness import COMPILER_NICENESS, yield_cpu_to_others
from worker.protocol.analyzed import analyzed
from worker.protocol.frames import FrameReader, frame
from worker.protocol.messages import Vocabulary
from worker.protocol.structured import StructuredOutputsParams
from worker.protocol.text.tokenizer import load_tokenizer

MEMORY_BYTES = 2 * 2**30
"""Maximum size of the process's address space, in bytes."""
PAYLOAD_BYTES = 16 * 2**20
"""Maximum size of a compiled grammar, in bytes."""
READ_BYTES = 1 << 20
"""Maximum number of bytes per read from a pipe."""
PROBE_TOKENS = 256
"""Number of random tokens with which a compiled grammar is tested."""
PROBE_S = 0.3
"""Maximum CPU time for all probe tokens, in seconds. Slower grammars are rejected, since they would
delay the steps of all requests."""


class GrammarCompilers:
    """Compiles grammars with the configured backends, and tests each grammar."""

    def __init__(self, setting: Setting) -> None:
        tokens = load_tokenizer(setting.tokenizer).vocabulary(setting.vocab_size)
        self._setting = setting
        self._tokens = tokens
        self._guidance: GuidanceBackend | None = None
        self._xgrammar: XGrammarBackend | None = None
        if setting.backend != "xgrammar":  # before the first job, which has a time limit
            self._guidance = GuidanceBackend(tokens, setting.eos_token_ids)
        if setting.backend != "guidance":
            self._xgrammar = XGrammarBackend.of_tokens(tokens, setting.eos_token_ids)

    def vocabulary(self) -> Vocabulary:
        """The vocabulary, in the form that the process that runs the grammars needs."""
        prepared = "" if self._xgrammar is None else self._xgrammar.serialize()
        return Vocabulary(self._tokens, self._setting.eos_token_ids, prepared)

    def compile(self, params: StructuredOutputsParams) -> Verdict:
        """Compiles a grammar with the configured backend. For auto, guidance is the fallback for
        JSON schemas, tags and patterns that xgrammar does not enforce."""
        if self._xgrammar is None:
            assert self._guidance is not None
            return self._try("guidance", self._guidance, params)
        verdict = self._try("xgrammar", self._xgrammar, params)
        if verdict.problem is None or self._guidance is None:
            return verdict
        if params.kind not in ("json", "regex", "structural_tag"):
            return verdict
        other = self._try("guidance", self._guidance, params)
        if other.problem is None:
            return other
        problems = f"{verdict.problem} (and llguidance: {other.problem})"
        if verdict.problem.startswith(NOT_ENFORCED) or verdict.problem == other.problem:
            problems = other.problem
        return Verdict(
            problem=problems,
            is_final=verdict.is_final and other.is_final,
        )

    def _try(self, name: str, backend: GrammarBackend, params: StructuredOutputsParams) -> Verdict:
        try:
            payload, warnings = _with_stderr(lambda: backend.compile(params))
            if warnings:
                raise GrammarError(warnings)
            if len(payload) > PAYLOAD_BYTES:
                raise GrammarError(
                    f"it is too large: compiled size {len(payload)} bytes, maximum "
                    f"{PAYLOAD_BYTES}: simplify it"
                )
            _probe(backend, payload, self._setting)
        except GrammarError as error:
            is_final = not isinstance(error, GrammarTooHeavy)
            return Verdict(problem=shortened(str(error)), is_final=is_final)
        except MemoryError:
            return Verdict(problem="it needs too much memory: simplify it", is_final=False)
        except RuntimeError as error:
            if "bad_alloc" in str(error):
                return Verdict(problem="it needs too much memory: simplify it", is_final=False)
            return Verdict(problem=shortened(str(error)))
        except RecursionError:
            return Verdict(problem="it is nested too deeply: simplify it")
        except ValueError as error:
            return Verdict(problem=shortened(f"it is malformed: {error}"))
        except KeyError as error:
            return Verdict(problem=shortened(f"it is malformed: {error} is missing: add it"))
        except (TypeError, AttributeError):
            return Verdict(problem="it is malformed: a field has the wrong type: fix it")
        return Verdict(backend=name, payload=payload)


def _probe(backend: GrammarBackend, payload: str, setting: Setting) -> None:
    """Tests a grammar with random tokens. Raises GrammarError if no token is allowed, or
    GrammarTooHeavy if it takes too long."""
    matcher = backend.load(payload)()
    vocab_size, ends = setting.vocab_size, np.array(setting.eos_token_ids, dtype=np.int64)
    words = np.zeros(-(-vocab_size // 32), dtype=np.int32)
    random = np.random.default_rng(0)
    spent = 0.0
    for index in range(PROBE_TOKENS):
        began = time.thread_time()
        matcher.fill(words)
        filled = time.thread_time()
        octets = words.view(np.uint8)
        (allowed,) = np.nonzero(np.unpackbits(octets, bitorder="little", count=vocab_size))
        if not index and not len(allowed):
            raise GrammarError("no text matches it")
        allowed = np.setdiff1d(allowed, ends)
        if not len(allowed):
            return
        resumed = time.thread_time()
        if not matcher.accept(int(random.choice(allowed))):
            return
        spent += filled - began + time.thread_time() - resumed
        if spent > PROBE_S:
            raise GrammarTooHeavy("it is ambiguous and too slow to match: simplify it")


def _with_stderr(run: Callable[[], str]) -> tuple[str, str]:
    """Result of `run`, and warnings that libraries wrote to the stderr file descriptor in the
    meantime."""
    saved = os.dup(2)
    with tempfile.TemporaryFile() as captured:
        os.dup2(captured.fileno(), 2)
        try:
            result = run()
        finally:
            os.dup2(saved, 2)
            os.close(saved)
        captured.seek(0)
        lines = captured.read().decode(errors="replace").splitlines()
    warnings = [line.partition("Warning: ")[2] for line in lines if "Warning: " in line]
    return result, "; ".join(dict.fromkeys(warnings))


def main() -> None:
    """Compiles grammars until stdin is closed."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # kills the process, even within a library
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    yield_cpu_to_others(COMPILER_NICENESS)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # library output must not corrupt the frames
    setting = msgspec.json.decode(sys.argv[1], type=analyzed(Setting))

    def answer(message: Vocabulary | Verdict) -> None:
        answers.write(frame(msgspec.msgpack.encode(message)))
        answers.flush()

    workshop = GrammarCompilers(setting)
    answer(workshop.vocabulary())
    reader = FrameReader()
    while data := os.read(sys.stdin.fileno(), READ_BYTES):
        for payload in reader.feed(data):
            job = msgspec.msgpack.decode(payload, type=analyzed(Job))
            # CPU time is limited, since wall-clock time depends on the load of the machine.
            signal.setitimer(signal.ITIMER_PROF, job.cpu_s)
            verdict = workshop.compile(job.params)
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            answer(verdict)


if __name__ == "__main__":
    main()
