"""Chat templates, tokenizing and block hashing in a thread pool."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, TypeVar

import numpy as np

from router.errors import bad_request
from router.fleet import BlockKey, Fleet, PromptBlocks
from worker.wire.bad_words import with_bad_words
from worker.wire.sampling import SamplingParams
from worker.wire.tokenizer import Tokenizer

T = TypeVar("T")


class PromptEncoder:
    """Makes prompts of one model ready to be routed.

    Args:
        tokenizer: of the model.
        fleet: says how its workers hash blocks.
        executor: where the work is done; never the event loop.
    """

    def __init__(self, tokenizer: Tokenizer, fleet: Fleet, executor: Executor) -> None:
        self._tokenizer = tokenizer
        self._fleet = fleet
        self._executor = executor

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        cache_salt: str = "",
        session: str = "",
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> PromptBlocks:
        """The prompt of a chat. Raises ApiError where the template refuses the messages."""
        keys = self._fleet.block_keys()

        def work() -> PromptBlocks:
            try:
                text = self._tokenizer.render_chat(
                    messages,
                    add_generation_prompt=add_generation_prompt,
                    **(chat_template_kwargs or {}),
                )
            except (ValueError, AttributeError, RecursionError) as error:
                # Templates come with checkpoints, and see whatever JSON the client sent.
                raise bad_request(str(error), "messages") from error
            token_ids = self._tokenizer.encode(text, add_special_tokens=False)
            return self._blocks(token_ids, cache_salt, session, keys)

        return await self._run(work)

    async def prompts(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        cache_salt: str = "",
        session: str = "",
        add_special_tokens: bool = True,
    ) -> list[PromptBlocks]:
        """Plain prompts, as text or token ids. Raises ApiError for ids outside the vocabulary."""
        keys = self._fleet.block_keys()
        info = self._fleet.info
        vocab_size = info.vocab_size if info is not None else self._tokenizer.vocab_size

        def work() -> list[PromptBlocks]:
            blocks = []
            for prompt in prompts:
                if isinstance(prompt, str):
                    token_ids = self._tokenizer.encode(
                        prompt, add_special_tokens=add_special_tokens
                    )
                else:
                    token_ids = _checked(prompt, vocab_size)
                blocks.append(self._blocks(token_ids, cache_salt, session, keys))
            return blocks

        return await self._run(work)

    async def bad_words(self, sampling: SamplingParams) -> SamplingParams:
        """The parameters with their bad words as tokens. Raises ApiError for one without any."""
        if not sampling.bad_words:
            return sampling

        def work() -> SamplingParams:
            try:
                return with_bad_words(sampling, self._tokenizer)
            except ValueError as error:
                raise bad_request(str(error), "bad_words") from error

        return await self._run(work)

    async def texts(
        self, prompts: Sequence[str | Sequence[int]], *, skip_special_tokens: bool = True
    ) -> list[str]:
        """Prompts as text, decoded where they are token ids."""

        def work() -> list[str]:
            return [
                prompt
                if isinstance(prompt, str)
                else self._tokenizer.decode(prompt, skip_special_tokens=skip_special_tokens)
                for prompt in prompts
            ]

        return await self._run(work)

    def _blocks(
        self, token_ids: list[int], cache_salt: str, session: str, keys: list[BlockKey]
    ) -> PromptBlocks:
        data = np.asarray(token_ids, dtype="<i4").tobytes()
        blocks = PromptBlocks(data, cache_salt, session=session, memo=self._fleet.memo)
        for key in keys:
            blocks.hashes(key)
        return blocks

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)


def _checked(token_ids: Sequence[int], vocab_size: int) -> list[int]:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise bad_request(
                f"token id {token_id} is outside of the vocabulary of {vocab_size} tokens", "prompt"
            )
    return list(token_ids)
