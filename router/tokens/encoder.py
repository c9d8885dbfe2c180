"""PromptEncoder: renders, tokenizes and hashes prompts; long ones in a thread pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple, TypeVar

import numpy as np

from router.errors import ApiError, bad_request, raise_for_problem
from router.fleet import Feasibility, Fleet, PromptBlocks
from router.tokens.pieces import PieceMemo, Tokens
from router.tokens.pool import WorkPool
from worker.protocol.adapters import AdapterRef
from worker.protocol.blocks import cache_scope
from worker.protocol.limits import Limits
from worker.protocol.messages import EngineInfo, TokenizerFingerprint
from worker.protocol.sampling import SamplingParams, with_bad_words
from worker.protocol.text.detokenizer import RequestText
from worker.protocol.text.tokenizer import EncodedTexts, Tokenizer
from worker.protocol.text.truncation import Truncation
from worker.protocol.tokenizer_fingerprint import difference, fingerprint

T = TypeVar("T")

_PER_VALUE = 8
"""Characters that a template may write around a value: names, brackets, punctuation."""
_SHORT = 1024
"""Maximum length in characters or tokens of a prompt that is encoded on the event loop, which takes
less than 0.5 ms. While the event loop is busy, a thread may wait 5 ms for the GIL."""


class TextPair(NamedTuple):
    """Two texts that the tokenizer joins into one prompt, as in the training of checkpoints that
    score pairs."""

    first: str
    second: str


class TemplatedPair(NamedTuple):
    """A prompt made of a template and two texts, of which only the document may be truncated."""

    head: str
    """Text up to the document, including the query."""
    document: str
    tail: str
    """Text after the document."""


Prompt = str | Sequence[int] | TextPair | TemplatedPair


class PromptEncoder:
    """Encodes the prompts of one model for routing.

    Methods take the `owner` of a prompt, the name of an API key; the threads are shared fairly
    between owners.

    Args:
        tokenizer: tokenizer of the model.
        fleet: workers of the model, whose limits and block-hash parameters apply.
        pool: threads for long prompts, which would block the event loop.
        assumed: limits that apply while no worker is ready.
    """

    def __init__(self, tokenizer: Tokenizer, fleet: Fleet, pool: WorkPool, assumed: Limits) -> None:
        self._tokenizer = tokenizer
        self._pieces = PieceMemo(tokenizer)
        self._fleet = fleet
        self._pool = pool
        self._assumed = assumed
        self._longest_token = tokenizer.longest_token

    async def chat(
        self,
        chat: ChatPrompt,
        feasibility: Feasibility,
        *,
        cache_salt: str = "",
        tenant: str = "",
        session: str = "",
        adapter: AdapterRef | None = None,
        owner: str = "",
        num_bytes: int = 0,
        last: int | None = None,
    ) -> PromptBlocks:
        """Encodes the prompt of a chat.

        Args:
            feasibility: checks the prompt's length.
            cache_salt: salt of the prefix cache.
            tenant: tenant that the prefix cache belongs to; empty if there is none.
            session: the client's conversation id; empty if there is none.
            adapter: LoRA adapter; None for the base model.
            owner: name of the API key.
            num_bytes: size of the request's body in bytes.
            last: maximum number of prompt tokens, of which the last are kept; None for no limit.

        Raises:
            ApiError: 429 if too much work is waiting; 400 if the template rejects the messages, or
                no worker can run the prompt.
        """
        accept = self._check(feasibility, last)
        check_length = self._check_characters(feasibility)
        blocks = self._blocks(cache_salt, tenant, session, adapter)

        def work() -> PromptBlocks:
            check_length(num_characters(chat.texts))
            text = chat.render(self._tokenizer)
            check_length(len(text))  # templates may repeat messages and add their own text
            token_ids = self._pieces.encode(text, cache_scope(cache_salt, tenant=tenant), accept)
            return blocks(_last(token_ids, last), 0)

        num_seen = num_characters(chat.texts, per_value=_PER_VALUE, enough=_SHORT)
        return await self._run(work, num_seen, owner, num_bytes)

    async def prompts(
        self,
        prompts: Sequence[Prompt],
        feasibility: Feasibility,
        *,
        cache_salt: str = "",
        tenant: str = "",
        session: str = "",
        adapter: AdapterRef | None = None,
        owner: str = "",
        add_special_tokens: bool = True,
        truncation: Truncation | None = None,
    ) -> list[PromptBlocks]:
        """Encodes prompts that are texts, pairs of texts or token ids. See `chat` for the other
        arguments.

        Args:
            add_special_tokens: whether to add the tokenizer's special tokens.
            truncation: maximum length of prompts; None to disable truncation.

        Raises:
            ApiError: 429 if too much work is waiting; 400 if a token id is outside the vocabulary,
                `truncation` leaves no room for text, or no worker can run one of the prompts.
        """
        accept = self._check(feasibility, None if truncation is None else truncation.maximum)
        check_length = self._check_characters(feasibility)
        info = self._fleet.info
        vocab_size = info.vocab_size if info is not None else self._tokenizer.vocab_size
        blocks = self._blocks(cache_salt, tenant, session, adapter)

        def work() -> list[PromptBlocks]:
            checked: list[str | TextPair | TemplatedPair | Tokens] = []
            for prompt in prompts:
                if isinstance(prompt, str | TextPair | TemplatedPair):
                    if truncation is None:
                        check_length(_length(prompt))
                    checked.append(prompt)
                else:
                    accept(len(prompt))
                    checked.append(_in_vocabulary(prompt, vocab_size))
            encoded: list[tuple[Sequence[int] | Tokens, int]] = []
            for given in checked:
                if isinstance(given, str | TextPair | TemplatedPair):
                    texts = _encoded(self._tokenizer, given, add_special_tokens, truncation)
                    accept(len(texts.token_ids))
                    encoded.append(texts)
                else:
                    encoded.append((given if truncation is None else given[truncation.cut], 0))
            return [blocks(*one) for one in encoded]

        return await self._run(work, sum(map(_length, prompts)), owner)

    @property
    def max_prompt_tokens(self) -> int:
        """Maximum number of prompt tokens that any worker supports."""
        return max(kind.max_prompt_tokens for kind in self._kinds())

    async def shortened(
        self, texts: Sequence[str], max_tokens: int, *, owner: str = ""
    ) -> list[str]:
        """Truncates texts to their first `max_tokens` tokens, not counting special tokens.

        Raises:
            ApiError: 429 if too much work is waiting.
        """

        def cut(text: str) -> str:
            starts = self._tokenizer.offsets(text, add_special_tokens=False)
            return text if len(starts) <= max_tokens else text[: starts[max_tokens]]

        return await self._run(lambda: [cut(text) for text in texts], sum(map(len, texts)), owner)

    async def tokens(
        self,
        prompt: str | ChatPrompt,
        *,
        owner: str = "",
        num_bytes: int = 0,
        add_special_tokens: bool = True,
    ) -> list[int]:
        """Token ids of a prompt, which may be longer than workers support.

        See `chat` for `owner` and `num_bytes`.

        Raises:
            ApiError: 429 if too much work is waiting; 400 if the template rejects the messages, or
                the text is too long for the model with any tokenization.
        """
        check_length = self._check_characters(Feasibility(SamplingParams(), {}))

        def work() -> list[int]:
            if isinstance(prompt, str):
                check_length(len(prompt))
                return self._tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
            check_length(num_characters(prompt.texts))
            text = prompt.render(self._tokenizer)
            check_length(len(text))
            return self._tokenizer.encode(text, add_special_tokens=False)

        texts = prompt if isinstance(prompt, str) else prompt.texts
        num_seen = num_characters(texts, per_value=_PER_VALUE, enough=_SHORT)
        return await self._run(work, num_seen, owner, num_bytes)

    async def first_that_fits(
        self,
        prompt_of: Callable[[int], ChatPrompt],
        number: int,
        max_tokens: int,
        *,
        owner: str = "",
        num_bytes: int = 0,
    ) -> int:
        """Index of the first chat that fits into the model's context, in a sequence of ever shorter
        chats; the last index if none fits.

        After the first chat, the shortest ones are tried, then ever longer ones, so that the time
        depends on the size of chats that fit.

        Args:
            prompt_of: creates the prompt of a chat by its index; called in a thread. Chats for
                which it raises ApiError do not fit.
            number: number of chats.
            max_tokens: maximum tokens of a prompt that fits.
            owner: name of the API key.
            num_bytes: size of the request's body in bytes.

        Raises:
            ApiError: 429 if too much work is waiting.
        """
        check_length = self._check_characters(Feasibility(SamplingParams(), {}))

        def fits(index: int) -> bool:
            try:
                prompt = prompt_of(index)
                check_length(num_characters(prompt.texts))
                text = prompt.render(self._tokenizer)
                check_length(len(text))
            except ApiError:
                return False  # far too long, or rejected by the template
            return len(self._tokenizer.encode(text, add_special_tokens=False)) <= max_tokens

        def work() -> int:
            if fits(0):
                return 0
            low, high, step = 1, number - 1, 1
            while low < high:
                middle = max(low, high - step)
                if not fits(middle):
                    low = middle + 1
                    break
                high, step = middle, 2 * step
            while low < high:
                middle = (low + high) // 2
                if fits(middle):
                    high = middle
                else:
                    low = middle + 1
            return high

        return 0 if number < 2 else await self._run(work, num_bytes, owner)

    async def text(self, token_ids: Sequence[int], *, owner: str = "") -> str:
        """The text of token ids, including special tokens.

        Raises:
            ApiError: 429 if too much work is waiting; 400 if an id is outside the vocabulary.
        """

        def work() -> str:
            _in_vocabulary(token_ids, self._tokenizer.vocab_size, "tokens")
            return self._tokenizer.decode(token_ids, skip_special_tokens=False)

        return await self._run(work, len(token_ids), owner)

    async def bad_words(self, sampling: SamplingParams) -> SamplingParams:
        """Tokenizes `bad_words`. Raises ApiError (400) for a word without tokens."""

        def work() -> SamplingParams:
            try:
                return with_bad_words(sampling, self._tokenizer)
            except ValueError as error:
                raise bad_request(str(error), "bad_words") from error

        return await self._run(work, sum(map(len, sampling.bad_words)))

    async def texts(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        owner: str = "",
        add_special_tokens: bool = True,
        skip_special_tokens: bool = True,
        with_offsets: bool = False,
        is_whole: bool = False,
    ) -> list[PromptText]:
        """Texts of prompts; token ids are decoded.

        Args:
            prompts: texts or token ids.
            owner: name of the API key.
            add_special_tokens: as for `prompts`.
            skip_special_tokens: whether special tokens among token ids are omitted from the text.
            with_offsets: whether to compute the text offsets of tokens.
            is_whole: whether the text is complete. Otherwise a completion follows, which may
                complete a character that the token ids have started.

        Raises:
            ApiError: 429 if too much work is waiting.
        """

        def text_of(prompt: str | Sequence[int]) -> PromptText:
            tokenizer = self._tokenizer
            if isinstance(prompt, str):
                offsets: Sequence[int] = ()
                if with_offsets:
                    offsets = tokenizer.offsets(prompt, add_special_tokens=add_special_tokens)
                return PromptText(prompt, offsets)
            text = tokenizer.decode(prompt, skip_special_tokens=skip_special_tokens)
            offsets = ()
            if with_offsets:
                reader = RequestText(
                    tokenizer.detokenizer(skip_special_tokens=skip_special_tokens),
                    with_offsets=True,
                )
                text = reader.push(prompt)
                offsets = reader.offsets or ()
                text += reader.flush()
            if not is_whole:
                context = tokenizer.context(prompt, skip_special_tokens=skip_special_tokens)
                begun = tokenizer.detokenizer(
                    context=context, skip_special_tokens=skip_special_tokens
                )
                text = text.removesuffix(begun.flush())
            return PromptText(text, offsets)

        size = (1 + with_offsets) * sum(map(len, prompts))
        return await self._run(lambda: [text_of(prompt) for prompt in prompts], size, owner)

    def _check(self, feasibility: Feasibility, last: int | None = None) -> Callable[[int], None]:
        """Creates a check that raises ApiError (400) for token counts that no ready worker
        supports.

        With `last`, prompts are truncated to that many tokens.
        """
        kinds = self._kinds()

        def accept(num_tokens: int) -> None:
            num_tokens = num_tokens if last is None else min(num_tokens, last)
            raise_for_problem(feasibility.prompt(kinds, num_tokens))

        return accept

    def _check_characters(self, feasibility: Feasibility) -> Callable[[int], None]:
        """Creates a check that raises ApiError (400) for character counts that no worker
        supports."""
        kinds = self._kinds()

        def accept(number: int) -> None:
            raise_for_problem(feasibility.characters(kinds, number, self._longest_token))

        return accept

    def _kinds(self) -> tuple[Limits, ...]:
        """Limits of the ready workers, or else the assumed ones; a copy for use in threads."""
        return tuple(self._fleet.limits) or (self._assumed,)

    def _blocks(
        self, cache_salt: str, tenant: str, session: str, adapter: AdapterRef | None
    ) -> Callable[[Sequence[int] | Tokens, int], PromptBlocks]:
        """Creates a function that hashes the tokens of a prompt for all kinds of ready workers. The
        function's second argument is the index of a pair's second text, or 0."""
        keys = self._fleet.block_keys()

        def blocks(token_ids: Sequence[int] | Tokens, second_text: int) -> PromptBlocks:
            data = np.asarray(token_ids, dtype="<i4").tobytes()
            prompt = PromptBlocks(
                *(data, cache_salt),
                adapter=adapter,
                tenant=tenant,
                session=session,
                memo=self._fleet.memo,
            )
            prompt.second_text = second_text
            for key in keys:
                prompt.hashes(key)
            return prompt

        return blocks

    async def _run(self, work: Callable[[], T], size: int, owner: str = "", at_least: int = 0) -> T:
        if size <= _SHORT:
            return work()
        return await self._pool.run(work, size=max(size, at_least), owner=owner)


class PromptText(NamedTuple):
    """The text of an echoed prompt."""

    text: str
    offsets: Sequence[int]
    """Index in the text where the text of each token starts; empty if not requested."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatPrompt:
    """A chat before rendering."""

    messages: Sequence[Mapping[str, Any]]
    """Messages in the format that chat templates expect."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """Tools in the format that chat templates expect; None if there are none."""
    add_generation_prompt: bool = True
    """Whether the prompt ends with the start of an assistant message."""
    continues: bool = False
    """Whether the model continues the last message, with which the prompt ends."""
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Additional variables of the chat template."""

    @property
    def texts(self) -> tuple[Any, ...]:
        """All data that the template may write."""
        return (self.messages, self.tools or (), self.template_arguments)

    def render(self, tokenizer: Tokenizer) -> str:
        """The rendered prompt. Raises ApiError (400) if the template rejects the messages."""
        try:
            text = tokenizer.render_chat(
                self.messages,
                tools=self.tools,
                add_generation_prompt=self.add_generation_prompt,
                **self.template_arguments,
            )
            if self.continues:
                return _up_to_end_of(self.messages[-1]["content"], text)
        # Templates are code of checkpoints, and receive any JSON that the client sends.
        except ValueError as error:
            raise bad_request(str(error), "messages") from error
        except AttributeError as error:
            problem = f"the chat template rejected the messages: {error}"
            raise bad_request(problem, "messages") from error
        except RecursionError as error:
            problem = "messages or tools are nested too deeply: simplify them"
            raise bad_request(problem, "messages") from error
        return text


class ParityCheck:
    """Compares workers' tokenizers with this gateway's, by their fingerprints (see fleet.Parity).

    Args:
        tokenizer: the model's tokenizer as loaded by this gateway.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[tuple[int, str], TokenizerFingerprint] = {}

    def __call__(self, info: EngineInfo) -> str | None:
        """How the worker's tokenizer differs from this gateway's; None if it does not, or if the
        worker has none."""
        if self._tokenizer.vocab_size > info.vocab_size and info.tokenizer:
            return (
                f"the model's vocabulary has {info.vocab_size} tokens, but --tokenizer "
                f"{info.tokenizer} has {self._tokenizer.vocab_size}: use the model's own tokenizer"
            )
        if info.tokenizer_fingerprint is None:
            return None
        key = (info.page_size, info.block_hash_salt)
        if key not in self._known:
            self._known[key] = fingerprint(self._tokenizer, *key)
        return difference(self._known[key], info.tokenizer_fingerprint)


def num_characters(data: Any, *, per_value: int = 0, enough: float = inf) -> int:
    """Number of characters of all strings in JSON data, including names.

    Args:
        data: JSON data, any part of which a template may write.
        per_value: characters added for each value.
        enough: number above which counting stops.
    """
    total, rest = 0, [data]
    while rest and total <= enough:
        value = rest.pop()
        total += per_value
        if isinstance(value, str):
            total += len(value)
        elif isinstance(value, Mapping):
            rest += value
            rest += value.values()
        elif isinstance(value, list | tuple):
            rest += value
    return total


def _length(prompt: Prompt) -> int:
    """Number of characters or tokens of a prompt."""
    if isinstance(prompt, TextPair | TemplatedPair):
        return sum(len(text) for text in prompt)
    return len(prompt)


def _encoded(
    tokenizer: Tokenizer,
    prompt: str | TextPair | TemplatedPair,
    add_special_tokens: bool,
    truncation: Truncation | None,
) -> EncodedTexts:
    """Tokens of a text or of a pair. Raises ApiError (400) if truncation leaves no room for it."""
    try:
        if isinstance(prompt, TemplatedPair):
            return EncodedTexts(_templated(tokenizer, prompt, truncation))
        return tokenizer.encode_texts(
            prompt, add_special_tokens=add_special_tokens, truncation=truncation
        )
    except ValueError as error:
        assert truncation is not None, "only truncation can fail"
        field = "truncate_prompt_tokens"
        raise bad_request(f"{field} is {truncation.maximum}, but {error}", field) from error


def _templated(
    tokenizer: Tokenizer, pair: TemplatedPair, truncation: Truncation | None
) -> list[int]:
    """Tokens of a templated pair, such as Qwen3-Reranker's. Only the document is truncated, so all
    text after it is kept.

    Raises:
        ValueError: truncation leaves no room for the document, or is on the left.
    """
    whole = tokenizer.encode("".join(pair), add_special_tokens=False)
    if truncation is None or len(whole) <= truncation.maximum:
        return whole
    if truncation.side == "left":
        raise ValueError("truncation_side left would remove the model's instruction: use right")
    tail = tokenizer.encode(pair.tail, add_special_tokens=False)
    num_kept = len(tokenizer.encode(pair.head, add_special_tokens=False)) + len(tail)
    if truncation.maximum <= num_kept:
        raise ValueError(
            f"the model's template and the query have {num_kept} tokens, which leaves no room for "
            "the document: increase truncate_prompt_tokens, or shorten the query"
        )
    body = tokenizer.encode(pair.head + pair.document, add_special_tokens=False)
    return [*body[: truncation.maximum - len(tail)], *tail]


def _last(token_ids: Sequence[int] | Tokens, maximum: int | None) -> Sequence[int] | Tokens:
    return token_ids if maximum is None else token_ids[-maximum:]


def _up_to_end_of(last: str, text: str) -> str:
    """A rendered chat up to the end of its last message.

    Args:
        last: content of the last message, which templates may strip.
        text: the rendered chat.

    Raises:
        ValueError: the chat does not contain the message.
    """
    body = last.strip()
    # HAZARD: str.rfind takes quadratic time on repetitive texts, str.find linear time.
    after = text[::-1].find(body[::-1])
    if not body or after < 0:
        raise ValueError(
            "the last message cannot be continued: it is empty, or the chat template changes it"
        )
    end = len(text) - after
    rest = last[len(last.rstrip()) :]
    return text[: end + len(rest)] if text.startswith(rest, end) else text[:end]


def _in_vocabulary(token_ids: Sequence[int], vocab_size: int, field: str = "prompt") -> Tokens:
    """Token ids as an array. Raises ApiError (400) if one is outside the vocabulary."""
    with suppress(OverflowError):
        tokens: Tokens = np.asarray(token_ids, "<i4")
        if not len(tokens) or (tokens.min() >= 0 and tokens.max() < vocab_size):
            return tokens
    wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
    raise bad_request(f"token id {wrong} is outside the vocabulary of {vocab_size} tokens", field)
