"""Drives a complete engine (scheduler, executor, runner) in this process, without Ray or HTTP."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np

from tests.support.engines.forked_rank import forking_ranks
from worker.config import EngineConfig
from worker.core.engine import EngineCore
from worker.core.executor_local import LocalExecutor
from worker.frontend.grammar.process import GrammarCompiler, Setting, setting_of
from worker.protocol.messages import Submit, SubmitBatch, TokenLogprobs
from worker.protocol.sampling import SamplingParams
from worker.rank.runner import ModelRunner


@dataclass
class Outcome:
    """Combined deltas of one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    ended_by_grammar: bool = False
    error: str | None = None
    pooled: bytes | None = None
    num_cached: int = field(default=0, compare=False)
    """Number of cached prompt tokens, which may differ between equal outputs."""


class _Compilers:
    """Keeps the last engine's compiler process for the next engine with the same vocabulary,
    because starting one takes half a second. It exits with this process, whose pipe it reads."""

    def __init__(self) -> None:
        self._kept: tuple[bytes, GrammarCompiler] | None = None

    def take(self, setting: Setting) -> GrammarCompiler:
        """Returns the kept compiler if it has this setting, otherwise a new one."""
        kept = self._kept
        if kept is None or kept[0] != msgspec.json.encode(setting):
            return GrammarCompiler(setting, 60.0)
        self._kept = None
        return kept[1]

    def give_back(self, setting: Setting, compiler: GrammarCompiler) -> None:
        """Keeps a compiler if it has started a process, and closes the previously kept one."""
        if compiler.vocabulary is None:
            compiler.close()
            return
        if self._kept is not None:
            self._kept[1].close()
        self._kept = msgspec.json.encode(setting), compiler


_COMPILERS = _Compilers()


class Engine:
    """An engine whose rank 0 runs in this process.

    Other ranks are child processes, as in offline use, but are forked from a process that has
    imported torch unless `forks` is false. Options are EngineConfig's fields. The defaults are
    float32 on CPU with one thread, because in bfloat16, the batch size can change the outcome of
    near ties. The engine's clock does not advance unless `clock` is given.
    """

    executor_class = LocalExecutor

    def __init__(
        self,
        model: str,
        *,
        clock: Callable[[], float] = lambda: 0.0,
        forks: bool = True,
        **options: Any,
    ) -> None:
        settings: dict[str, Any] = {
            "device": "cpu",
            "dtype": "float32",
            "cpu_threads": 1,
            "host_cache_gib": 0.0,
            "max_num_seqs": min(32, options.get("max_num_batched_tokens", 32)),
        }
        self.config = EngineConfig.of(model=model, **{**settings, **options})
        self._directory = tempfile.mkdtemp(prefix="rf-")
        world = self.config.tensor_parallel_size
        with forking_ranks() if forks else nullcontext():
            self._executor = self.executor_class(self.config, self._directory, range(1, world))
        try:
            info = self._executor.start()
        except BaseException:
            self._executor.close()  # also the process group, which the next engine may need
            raise
        self.core = EngineCore(self.config, info, self._executor, clock)
        self._setting = setting_of(info)
        self._compiler = _COMPILERS.take(self._setting)
        self._num_submitted = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _COMPILERS.give_back(self._setting, self._compiler)
        self.core.close()
        self._executor.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams | Sequence[SamplingParams]
    ) -> list[list[int]]:
        """Generated tokens of all prompts, which are submitted together. Checks invariants after
        each step."""
        return [outcome.token_ids for outcome in self.outcomes(prompts, sampling)]

    def outcomes(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams | Sequence[SamplingParams]
    ) -> list[Outcome]:
        """Outcomes of all prompts, with log-probabilities."""
        params = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
        pairs = zip(prompts, params, strict=True)
        outputs = dict(self.submit(prompt, one) for prompt, one in pairs)
        while self.core.grammars.num_due:  # so that batches are the same each time
            self.core.take_grammars(wait=True)
        self.drain(outputs)
        return list(outputs.values())

    def submit(
        self, prompt: Sequence[int], sampling: SamplingParams, **options: Any
    ) -> tuple[str, Outcome]:
        """Queues one request; returns its id, and the outcome that collects its deltas. Options are
        other fields of Submit."""
        self._num_submitted += 1
        submit = Submit(
            request_id=str(self._num_submitted),
            gateway_id="g",
            prompt=np.asarray(prompt, dtype="<i4").tobytes(),
            sampling=sampling,
            **options,
        )
        self.core.receive(self._with_grammar(submit))
        return submit.request_id, Outcome()

    def drain(self, outputs: dict[str, Outcome]) -> None:
        """Runs steps until all requests have ended, including those that wait for the mask of a
        slow token. On a loaded machine, any token can be slow."""
        while self.core.has_work() or self.core.grammars.num_due:
            self.core.take_grammars(wait=not self.core.has_work())
            self.step(outputs)

    def step(self, outputs: dict[str, Outcome]) -> None:
        """Runs one step of the engine and adds its deltas to `outputs`; checks invariants."""
        for delta in self.core.step().deltas.get("g", ()):
            outcome = outputs[delta.request_id]
            outcome.token_ids += delta.token_ids
            outcome.logprobs += delta.logprobs or []
            if delta.prompt_logprobs is not None:
                outcome.prompt_logprobs = [
                    *(outcome.prompt_logprobs or ()),
                    *delta.prompt_logprobs,
                ]
            outcome.finish_reason = delta.finish_reason
            outcome.ended_by_grammar = delta.ended_by_grammar
            outcome.error = delta.error
            outcome.pooled = delta.pooled
            outcome.num_cached = max(outcome.num_cached, delta.num_cached_tokens)
        self.core.scheduler.check_invariants()
        self.after_step()

    def _with_grammar(self, submit: Submit) -> SubmitBatch:
        """The batch that the frontend creates for the request."""
        params = submit.sampling.structured_outputs
        if params is None:
            return SubmitBatch(submits=[submit])
        compiled = self._compiler.compile(params)
        submit.grammar = compiled.key
        return SubmitBatch(
            submits=[submit], grammars=[compiled], vocabulary=self._compiler.vocabulary
        )

    def after_step(self) -> None:
        """Hook for subclasses, called after each step."""

    @property
    def runner(self) -> ModelRunner:
        """Runner of rank 0."""
        return self._executor._rank.runner

    @property
    def peer_pids(self) -> list[int]:
        """Process ids of all ranks except 0."""
        children = self._executor._others._children
        return [child.pid for _, child in children.values()]

    @property
    def num_preemptions(self) -> int:
        """Number of preemptions so far."""
        return self.core.scheduler.take_report().load.num_preemptions
