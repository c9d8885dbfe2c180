"""Grammar store of the coordinator: loads compiled grammars in a separate thread."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import weakref
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from worker.core.grammar.base import (
    GrammarBackend,
    GrammarError,
    GrammarFault,
    LoadedGrammar,
    Matcher,
    shortened,
)
from worker.core.grammar.guidance_backend import GuidanceBackend
from worker.core.grammar.matcher_state import MatcherState
from worker.core.grammar.state import GrammarProblem, GrammarState
from worker.core.grammar.thoughts import ThoughtMatcher
from worker.core.grammar.xgrammar_backend import XGrammarBackend
from worker.protocol.messages import CompiledGrammar, EngineInfo, Submit, SubmitBatch, Vocabulary


class Provided(NamedTuple):
    """Outcome for a held request: a grammar state with which it can be scheduled, or a problem."""

    request_id: str
    attempt: int
    grammar: GrammarState | GrammarProblem


class _Entry:
    """A compiled grammar and, after the first request for it, its loaded form."""

    def __init__(self, compiled: CompiledGrammar) -> None:
        self.compiled = compiled
        self.loaded: LoadedGrammar | None = None


class GrammarStore:
    """Stores grammars, creates matchers for requests, and advances slow ones.

    xgrammar and llguidance release the GIL most of the time: 0.5 s of loading blocked another
    thread for at most 12 ms.

    Args:
        info: provides the EOS tokens and vocabulary size of the model.
    """

    def __init__(self, info: EngineInfo) -> None:
        self.num_due = 0
        """Number of grammar states that are being created or advanced, or that `take` has not
        returned yet."""
        self._info = info
        self._vocabulary: Vocabulary | None = None
        self._backends: dict[str, GrammarBackend] = {}
        self._entries: dict[str, _Entry] = {}
        self._provided: list[Provided] = []
        # HAZARD: the pipe contains a byte if and only if something is provided; both change under
        # this lock.
        self._handover = threading.Lock()
        # Two threads, so that new requests do not wait for slow grammars.
        self._loading = ThreadPoolExecutor(1, "grammar-loads")
        self._advancing = ThreadPoolExecutor(1, "slow-grammars")
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._finalizer = weakref.finalize(self, _close_all, self._wake_read, self._wake_write)

    @property
    def wake_fd(self) -> int:
        """File descriptor that is readable when `take` has something to return."""
        return self._wake_read

    def receive(self, batch: SubmitBatch) -> None:
        """Adds a batch's vocabulary and grammars, and removes the grammars that it lists as
        dropped."""
        for key in batch.dropped_grammars:
            self._entries.pop(key, None)
        if batch.vocabulary is not None:
            self._vocabulary = batch.vocabulary
        for compiled in batch.grammars:
            self._entries[compiled.key] = _Entry(compiled)

    def request(self, submit: Submit) -> None:
        """Starts creating the matcher of a request with a grammar or a thinking budget."""
        # The entry rather than its key, since a later batch may drop it in the meantime.
        entry = self._entries.get(submit.grammar)
        self._begin(
            self._loading,
            submit.request_id,
            submit.attempt,
            lambda: self._create_state(entry, submit),
        )

    def advance(self, request_id: str, attempt: int, grammar: GrammarState, token_id: int) -> None:
        """Starts advancing a slow grammar by a token."""

        def take() -> GrammarState | GrammarProblem:
            return grammar.advance(token_id) or grammar

        self._begin(self._advancing, request_id, attempt, take)

    def take(self, *, wait: bool = False) -> list[Provided]:
        """Returns the grammar states that are ready. With `wait`, waits until at least one is, if
        any is due."""
        if not self.num_due:
            return []
        if wait:
            poller = select.poll()
            poller.register(self._wake_read, select.POLLIN)
            poller.poll()
        with self._handover:
            taken, self._provided = self._provided, []
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 65536)
        self.num_due -= len(taken)
        return taken

    def close(self) -> None:
        """Stops the threads after they have finished their queued work."""
        self._loading.shutdown()
        self._advancing.shutdown()
        self._finalizer()

    def _begin(
        self,
        thread: ThreadPoolExecutor,
        request_id: str,
        attempt: int,
        work: Callable[[], GrammarState | GrammarProblem],
    ) -> None:
        def run() -> None:
            grammar: GrammarState | GrammarProblem
            try:
                grammar = work()
            except GrammarError as error:
                grammar = GrammarProblem(str(error), 400)
            except Exception as error:
                # For any error: the request must not wait forever.
                problem = shortened(f"structured_outputs: internal error: {error!r}")
                grammar = GrammarProblem(problem, 500)
            with self._handover:
                self._provided.append(Provided(request_id, attempt, grammar))
                with contextlib.suppress(BlockingIOError):  # if full, the reader wakes up anyway
                    os.write(self._wake_write, b"\0")

        self.num_due += 1
        thread.submit(run)

    def _create_state(self, entry: _Entry | None, submit: Submit) -> MatcherState:
        tokens = array("i")
        tokens.frombytes(submit.prompt)
        matcher = self._matcher(entry) if submit.grammar else None
        eos_token_ids, vocab_size = self._info.eos_token_ids, self._info.vocab_size
        if (thought := submit.sampling.thought) is not None:
            matcher = ThoughtMatcher(
                matcher, thought, eos_token_ids=eos_token_ids, vocab_size=vocab_size
            )
        assert matcher is not None, "not a guided request"
        return MatcherState(
            matcher,
            submit.sampling,
            eos_token_ids=eos_token_ids,
            vocab_size=vocab_size,
            output=tokens[len(tokens) - submit.num_resumed :],
        )

    def _matcher(self, entry: _Entry | None) -> Matcher:
        if entry is None:
            raise GrammarFault("the grammar is missing from the batch")
        if entry.loaded is None:
            backend = self._backend(entry.compiled.backend)
            try:
                entry.loaded = backend.load(entry.compiled.payload)
            except GrammarError as error:  # the compiling process was able to load it
                raise GrammarFault(str(error)) from error
        return entry.loaded()

    def _backend(self, name: str) -> GrammarBackend:
        backend = self._backends.get(name)
        if backend is None:
            vocabulary = self._vocabulary
            assert vocabulary is not None, "a grammar was received before the vocabulary"
            if name == "xgrammar":
                backend = XGrammarBackend.of_serialized(vocabulary.xgrammar)
            else:
                backend = GuidanceBackend(vocabulary.tokens, vocabulary.eos_token_ids)
            self._backends[name] = backend
        return backend


def _close_all(*fds: int) -> None:
    for fd in fds:
        os.close(fd)
