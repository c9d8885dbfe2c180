"""Offline generation without Ray: the engine of workers, driven by the caller.

from worker.llm import LLM, SamplingParams

with LLM("deploy/models/demo") as llm:
    for output in llm.generate(["What is 3 + 4?"], SamplingParams(temperature=0)):
        print(output.outputs[0].text)
"""

from __future__ import annotations

import itertools
import secrets
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, NotRequired, Self, TypedDict

import numpy as np

from worker.config import EngineConfig, pinned
from worker.core.adapter_folder import check_adapter
from worker.core.engine import EngineCore
from worker.core.executor import Executor, RankFailure
from worker.core.executor_factory import create_executor
from worker.core.grammar.base import GrammarError
from worker.frontend.grammar.process import GrammarCompiler, grammar_key, setting_of
from worker.outputs import (
    ChoiceState,
    CompletionOutput,
    Logprob,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
)
from worker.protocol.adapters import AdapterRef
from worker.protocol.blocks import cache_scope
from worker.protocol.limits import refuse
from worker.protocol.messages import Abort, Submit, SubmitBatch
from worker.protocol.pooling import PoolingParams
from worker.protocol.sampling import SamplingParams, with_bad_words
from worker.protocol.structured import StructuredOutputsParams
from worker.protocol.text.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "LLM",
    "CompletionOutput",
    "LoRARequest",
    "Logprob",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "TokensPrompt",
]


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """A LoRA adapter for `LLM.generate`, as in vLLM."""

    lora_name: str
    """Name of the adapter in error messages."""
    lora_int_id: int
    """Ignored: adapters are identified by the content of their files."""
    lora_path: str
    """Folder that contains the adapter in PEFT format."""


class TokensPrompt(TypedDict):
    """A tokenized prompt."""

    prompt_token_ids: list[int]
    token_type_ids: NotRequired[list[int]]
    """Token types of a text pair for BERT cross-encoders: 0 for the first text, 1 for the
    second.
    """


Prompt = str | TokensPrompt

_COMPILE_S = 30.0
"""CPU time limit for compiling a grammar, in seconds. It is long, since no other clients are
waiting."""
_MAX_GRAMMARS = 256
"""Maximum number of compiled grammars in the engine; when it is reached, all are dropped."""

_GATEWAY = ""
"""Gateway id of all requests, since this process is the only receiver of reports."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pending:
    """A prompt and its choices, each of which is a separate request."""

    index: int
    prompt: Prompt
    token_ids: list[int]
    choices: list[ChoiceState]

    @property
    def finished(self) -> bool:
        return all(choice.finished for choice in self.choices)


class _OpenChoice(NamedTuple):
    """An unfinished choice, and the prompts of the same call that have new output."""

    item: _Pending
    choice: ChoiceState
    grown: dict[int, _Pending]
    """Prompts of the call with output that has not been yielded yet, by index. Shared by all
    choices of the call."""


class LLM:
    """A loaded model. Engine options have the same names as the CLI's flags.

    Args:
        model: checkpoint folder or Hub repository id.
        tokenizer: folder or repository of a tokenizer that replaces the model's.
        engine_options: options of EngineConfig and its groups (see `EngineConfig.of`).

    Raises:
        ValueError: an option is invalid, or the model is not on the Hub; the message names the
            option or the model.
        RankFailure: a rank failed to start; the root cause is in the message.
    """

    def __init__(self, model: str, *, tokenizer: str | None = None, **engine_options: Any) -> None:
        # The caller waits for all of its requests, so nothing is rejected.
        options = {"max_queued_requests": 0, **engine_options}
        self.config = pinned(EngineConfig.of(model=model, tokenizer=tokenizer or "", **options))
        self._tokenizer: Tokenizer | None = None
        self._ids = itertools.count()
        directory = tempfile.mkdtemp(prefix="rf-")
        executor = create_executor(self.config, directory, spawn_peers=True)
        # Also stops the rank processes if the owner never calls close(), or if this constructor
        # fails halfway.
        self._finalizer = weakref.finalize(self, _release, executor, directory)
        try:
            info = executor.start()
        except BaseException:
            self._finalizer()
            raise
        self.config = self.config.with_limits(info.max_num_seqs, info.max_num_batched_tokens)
        self._core = EngineCore(self.config, info, executor, time.monotonic)
        self._compiler = GrammarCompiler(setting_of(info), _COMPILE_S)
        self._grammars: dict[str, None] = {}
        """Keys of the compiled grammars in the engine."""
        self._open: dict[str, _OpenChoice] = {}
        """Unfinished choices of all calls, by request id. Several streams may be read
        alternately.
        """
        weakref.finalize(self, self._compiler.close)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. It is loaded on first use, since tokenized prompts with
        `detokenize=False` need none."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.config.tokenizer_checkpoint)
        return self._tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        detokenize: bool = True,
        lora_request: LoRARequest | None = None,
    ) -> list[RequestOutput]:
        """Completes all prompts in batches and returns the outputs in order.

        Args:
            prompts: texts, or `{"prompt_token_ids": [...]}`.
            sampling_params: one for all prompts or one per prompt; None uses the defaults.
            detokenize: False leaves texts empty; needs no tokenizer, but stop strings are not
                supported.
            lora_request: LoRA adapter; None for the base model.

        Raises:
            ValueError: a prompt exceeds the engine's limits, or the adapter is not supported.
            RankFailure: a rank exited.
        """
        batch = _as_list(prompts)
        outputs: dict[int, RequestOutput] = {}
        params, adapter = _spread(sampling_params, batch), self._adapter(lora_request)
        for index, output in self._run(batch, params, detokenize, adapter):
            if output.finished:
                outputs[index] = output
        return [outputs[index] for index in range(len(batch))]

    def encode(
        self, prompts: Prompt | Sequence[Prompt], pooling_params: PoolingParams | None = None
    ) -> list[PoolingRequestOutput]:
        """Computes the vectors of all prompts in batches, and returns them in order. A vector is an
        embedding or the logits of the labels.

        Args:
            prompts: texts, or `{"prompt_token_ids": [...]}`.
            pooling_params: parameters of all prompts; None uses the defaults.

        Raises:
            ValueError: the model is not a pooling model, or a prompt is too long.
            RankFailure: a rank exited.
        """
        sampling = SamplingParams(pooling=pooling_params or PoolingParams())
        return [
            PoolingRequestOutput(
                request_id=output.request_id,
                prompt_token_ids=output.prompt_token_ids,
                outputs=PoolingOutput(data=np.frombuffer(output.outputs[0].pooled or b"", "<f4")),
                num_cached_tokens=output.num_cached_tokens,
            )
            for output in self.generate(prompts, sampling, detokenize=False)
        ]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Yields the output so far after each step that adds to it.

        Leaving the iterator early aborts the request. Raises the same errors as `generate`.
        """
        for _, output in self._run([prompt], _spread(sampling_params, [prompt]), True):
            yield output

    def close(self) -> None:
        """Stops the rank processes and frees their resources. Idempotent."""
        self._compiler.close()
        self._core.close()
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _run(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        detokenize: bool,
        adapter: AdapterRef | None = None,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Submits all prompts, then runs steps; yields (prompt index, output) for each output that
        grew."""
        if not self._finalizer.alive:
            raise ValueError("this LLM is closed")
        if len(self._grammars) >= _MAX_GRAMMARS:
            self._core.receive(SubmitBatch(dropped_grammars=list(self._grammars)))
            self._grammars.clear()
        pending = [
            self._make_pending(index, prompt, sampling, detokenize, adapter)
            for index, (prompt, sampling) in enumerate(zip(prompts, params, strict=True))
        ]
        grown: dict[int, _Pending] = {}
        choices = {
            choice.submit.request_id: _OpenChoice(item, choice, grown)
            for item in pending
            for choice in item.choices
        }
        num_left = len(pending)
        try:
            self._open.update(choices)
            for opened in choices.values():
                self._core.add(opened.choice.submit)
            while num_left:
                if not grown:
                    self._step()
                    continue
                # Yielded one at a time: while the caller uses one, other calls may run steps.
                item = grown.pop(next(iter(grown)))
                num_left -= item.finished
                yield item.index, _assemble(item)
        except RankFailure:
            self.close()  # the other ranks are useless now
            raise
        finally:
            self._abandon(choices)

    def _step(self) -> None:
        """Runs a step of the engine and passes its tokens to the calls that are waiting
        for them."""
        if not self._finalizer.alive:
            raise ValueError("this LLM was closed during generation")
        if not self._core.has_work():
            self._core.take_grammars(wait=True)
        for delta in self._core.step().deltas.get(_GATEWAY, ()):
            opened = self._open.get(delta.request_id)
            if opened is None:
                continue  # ended by a stop string a step ago, or abandoned
            opened.choice.apply(delta)
            opened.grown[opened.item.index] = opened.item
            if opened.choice.finished:
                del self._open[delta.request_id]
                if delta.finish_reason is None:
                    self._core.abort(Abort(request_id=delta.request_id))

    def _adapter(self, request: LoRARequest | None) -> AdapterRef | None:
        """Resolves the adapter of a request. Raises ValueError if it is not supported."""
        if request is None:
            return None
        info = self._core.info
        if not info.max_loras:
            raise ValueError("lora_request requires enable_lora=True")
        check = check_adapter(request.lora_path, info.max_lora_rank)
        if check.problem:
            raise ValueError(f"LoRA adapter {request.lora_name}: {check.problem}")
        return AdapterRef(request.lora_name, request.lora_path, check.version)

    def _make_pending(
        self,
        index: int,
        prompt: Prompt,
        sampling: SamplingParams,
        detokenize: bool,
        adapter: AdapterRef | None,
    ) -> _Pending:
        if isinstance(prompt, str):
            token_ids, second_text = self.get_tokenizer().encode(prompt), 0
        else:
            token_ids = list(prompt["prompt_token_ids"])
            second_text = _second_text(index, prompt)
        vocab_size = self._core.info.vocab_size
        outside = [token for token in token_ids if not 0 <= token < vocab_size]
        if outside:
            raise ValueError(
                f"prompt {index} has token id {outside[0]}, which is out of range: the vocabulary "
                f"has {vocab_size} tokens"
            )
        seed = sampling.seed if sampling.seed is not None else secrets.randbits(62)
        tokenizer = self.get_tokenizer() if detokenize else None
        if sampling.bad_words:
            sampling = with_bad_words(sampling, self.get_tokenizer())
        grammar = ""
        if sampling.structured_outputs is not None:
            grammar = self._grammar(index, sampling.structured_outputs)
            sampling = sampling.amended(structured_outputs=None)
        num_choices = sampling.n
        first = sampling.amended(n=1)
        # Prompt log-probabilities are the same for all choices.
        others = first.amended(prompt_logprobs=None)
        choices = []
        for choice in range(num_choices):
            submit = Submit(
                request_id=str(next(self._ids)),
                gateway_id=_GATEWAY,
                prompt=np.asarray(token_ids, dtype="<i4").tobytes(),
                sampling=others if choice else first,
                seed=(seed + choice) % 2**64,
                grammar=grammar,
                cache_salt=cache_scope(adapter="" if adapter is None else adapter.version),
                adapter=adapter,
                second_text=second_text,
            )
            rejection = refuse(submit, self._core.info)
            if rejection is not None:
                raise ValueError(f"prompt {index}: {rejection.message}")
            choices.append(ChoiceState(submit, choice, tokenizer))
        return _Pending(index=index, prompt=prompt, token_ids=token_ids, choices=choices)

    def _grammar(self, index: int, params: StructuredOutputsParams) -> str:
        """Compiles a grammar unless the engine already has it; returns its key. Raises ValueError
        if it is invalid or too complex."""
        key = grammar_key(params)
        if key not in self._grammars:
            try:
                compiled = self._compiler.compile(params)
            except GrammarError as error:
                raise ValueError(f"prompt {index}: {error}") from error
            vocabulary = None if self._grammars else self._compiler.vocabulary
            self._core.receive(SubmitBatch(vocabulary=vocabulary, grammars=[compiled]))
            self._grammars[key] = None
        return key

    def _abandon(self, request_ids: Iterable[str]) -> None:
        """Aborts requests left over after an exception or an abandoned iterator."""
        left = [
            request_id for request_id in request_ids if self._open.pop(request_id, None) is not None
        ]
        for request_id in left:
            self._core.abort(Abort(request_id=request_id))
        # Steps in flight still use their pages. If other calls are open, those run the steps.
        while left and not self._open and self._finalizer.alive and self._core.has_work():
            self._core.step()


def _assemble(item: _Pending) -> RequestOutput:
    return RequestOutput(
        request_id=item.choices[0].submit.request_id,
        prompt=item.prompt if isinstance(item.prompt, str) else None,
        prompt_token_ids=item.token_ids,
        outputs=[choice.output for choice in item.choices],
        finished=item.finished,
        num_cached_tokens=item.choices[0].num_cached_tokens,
        prompt_logprobs=item.choices[0].prompt_logprobs,
    )


def _second_text(index: int, prompt: TokensPrompt) -> int:
    """Index of the first token of type 1; 0 if there is none. Raises ValueError if the types are
    invalid."""
    types = prompt.get("token_type_ids") or [0] * len(prompt["prompt_token_ids"])
    num_first = types.index(1) if 1 in types else len(types)
    if types != [0] * num_first + [1] * (len(prompt["prompt_token_ids"]) - num_first):
        raise ValueError(f"prompt {index}: token_type_ids must be zeros, then ones, one per token")
    return num_first if 1 in types else 0


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | dict):
        return [prompts]
    return list(prompts)


def _spread(
    params: SamplingParams | Sequence[SamplingParams] | None, prompts: Sequence[Prompt]
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * len(prompts)
    if len(params) != len(prompts):
        raise ValueError(
            f"got {len(params)} sampling_params for {len(prompts)} prompts: pass one for all, or "
            "one per prompt"
        )
    return list(params)


def _release(executor: Executor, directory: str) -> None:
    executor.close()
    shutil.rmtree(directory, ignore_errors=True)
