"""Tokenizer and chat template of a checkpoint, without transformers and torch."""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from worker.protocol.hub import download, local_folder
from worker.protocol.retry import Unavailable
from worker.protocol.text.chat_template import ChatTemplate
from worker.protocol.text.detokenizer import (
    CHARACTER_TOKENS,
    TRIM_TOKENS,
    ByteDetokenizer,
    Detokenizer,
    StreamDetokenizer,
    bytes_of_token,
    pending_of,
)
from worker.protocol.text.separators import separators
from worker.protocol.text.truncation import Truncation

SHORT_TEXT = 1024
"""Maximum length in characters of texts that are encoded inline, which takes at most a
millisecond.
"""

SPECIAL_TOKEN_KEYS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


class EncodedTexts(NamedTuple):
    """Tokens of a text, or of a pair of texts."""

    token_ids: list[int]
    second_text: int = 0
    """Index of the first token of type 1, which belongs to the second text; 0 if all types are
    0.
    """


class Tokenizer:
    """Tokenizer of a checkpoint. All methods are thread-safe.

    Args:
        backend: the `tokenizers` object of tokenizer.json.
        chat_template: Jinja source; None if the checkpoint has none.
        special_tokens: special tokens by role (`eos_token`, ...), which templates can use as
            variables.
        response_template: the checkpoint's description of its output; None if it has none.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        response_template: object = None,
    ) -> None:
        backend.no_padding()
        backend.no_truncation()
        self.special_tokens = dict(special_tokens or {})
        self.response_template = response_template
        """Description of the checkpoint's output in the format of transformers, not validated; None
        if there is none."""
        self._backend = backend
        self._template: ChatTemplate | None = None
        if chat_template is not None:
            self._template = ChatTemplate(chat_template, self.special_tokens)
        kinds = _decoder_kinds(backend)
        self._byte_level = "ByteLevel" in kinds
        """Whether token names use GPT-2's byte alphabet."""
        self._is_bytes = kinds[:1] == ["ByteLevel"] and not {*kinds[1:]} - {"Fuse"}
        """Whether text is the concatenation of its tokens' bytes."""
        added_ids = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(n for n, token in added_ids.items() if token.special)
        """Ids of special tokens, which have no text, such as end-of-turn tokens."""
        added = added_ids.values()
        template = chat_template or ""
        candidates = {token.content for token in added if token.content in template}
        self._separators = separators(added, candidates.union(self.special_tokens.values()))
        self._token_bytes: dict[tuple[bool, frozenset[str]], dict[int, bytes]] = {}
        self._all_token_bytes: dict[int, bytes] = {}
        """Bytes by token id, including special tokens; filled on demand."""
        self._longest_token: int | None = None

    @property
    def vocab_size(self) -> int:
        """Number of tokens, including added tokens."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def longest_token(self) -> int:
        """Length of the longest token of the vocabulary, in characters. Slow on first access.

        As in vLLM, a text longer than N times this is treated as having more than N tokens,
        although a normalizer might shorten it, or a single token might cover many unknown
        characters.
        """
        if self._longest_token is None:
            vocabulary = self._backend.get_vocab(with_added_tokens=True)
            self._longest_token = max(map(len, vocabulary), default=1)
        return self._longest_token

    @property
    def chat_template(self) -> ChatTemplate | None:
        """Chat template used by `render_chat`; None if the checkpoint has none."""
        return self._template

    def with_chat_template(self, source: str) -> Tokenizer:
        """Copy of this tokenizer with another chat template, and without a response template.
        Raises ValueError if the chat template has a syntax error."""
        return Tokenizer(self._backend, chat_template=source, special_tokens=self.special_tokens)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, by default with the special tokens that the checkpoint adds."""
        # HAZARD: the library's `encode` holds the GIL: for a long prompt it would block every
        # stream of the process, whatever thread runs it. Batch encoding does not.
        if len(text) <= SHORT_TEXT:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def encode_texts(
        self,
        texts: str | tuple[str, str],
        *,
        add_special_tokens: bool = True,
        truncation: Truncation | None = None,
    ) -> EncodedTexts:
        """Tokens of a text, or of a pair of texts joined as the checkpoint specifies.

        Args:
            texts: the text or the pair.
            add_special_tokens: whether to add the checkpoint's special tokens.
            truncation: maximum length; None disables truncation.

        Raises:
            ValueError: `truncation` leaves no room for text.
        """
        # HAZARD: `encode_batch_fast` loses the types of pairs that no post-processor joins.
        is_text = isinstance(texts, str)
        encode = self._backend.encode_batch_fast if is_text else self._backend.encode_batch
        [encoding] = encode([texts], add_special_tokens=add_special_tokens)
        token_ids = encoding.ids
        types = [] if is_text else encoding.type_ids
        if truncation is not None and len(token_ids) > truncation.maximum:
            kept = truncation.kept(encoding.sequence_ids)
            token_ids, types = [token_ids[i] for i in kept], [types[i] for i in kept if types]
        return EncodedTexts(token_ids, types.index(1) if 1 in types else 0)

    def offsets(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Index in `text` at which the text of each token of `encode` begins.

        A token ends where the next one begins. White space dropped by the tokenizer thus belongs to
        the following token, and a character of several tokens belongs to the last one. Special
        tokens that the checkpoint adds to texts are empty.
        """
        [encoding] = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        offsets: list[int] = []
        last = end = 0
        for is_added, span in zip(encoding.special_tokens_mask, encoding.offsets, strict=True):
            if not is_added:
                last = max(last, min(end, span[0]))
                end = max(end, span[1])
            offsets.append(end if is_added else last)
        return offsets

    def pieces(self, text: str) -> list[str]:
        """Splits `text` into pieces that can be tokenized independently.

        The text is split before special tokens of the chat template, such as between messages.
        """
        if self._separators is None:
            return [text]
        cuts = [found.start() for found in self._separators.finditer(text) if found.start()]
        return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    def encode_pieces(self, pieces: Sequence[str]) -> list[list[int]]:
        """Token ids of each piece, without the special tokens that the checkpoint adds to texts."""
        encodings = self._backend.encode_batch_fast(pieces, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of a whole token sequence."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_id(self, token: str) -> int | None:
        """Id of a token by its name, such as `"<|im_end|>"`; None if there is none."""
        return self._backend.token_to_id(token)

    def token(self, token_id: int) -> str | None:
        """Name of a token in the vocabulary, such as Ġis; None for an unknown id."""
        return self._backend.id_to_token(token_id)

    def vocabulary(self, size: int) -> list[bytes]:
        """Bytes of each token of a model, in the form that grammar libraries need.

        Empty for ids without a token and for special tokens. The name of a special token, spelled
        out in a text, is not that token, so grammars must not generate it.

        Args:
            size: vocabulary size of the model, which may exceed the tokenizer's.
        """
        special = self.special_token_ids
        return [b"" if number in special else self.token_bytes(number) for number in range(size)]

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of a token (possibly an incomplete character); the name of a special token."""
        known = self._all_token_bytes.get(token_id)
        if known is None:
            known = bytes_of_token(self._backend, token_id, byte_level=self._byte_level)
            self._all_token_bytes[token_id] = known
        return known

    def special_tokens_named(self, names: Collection[str]) -> frozenset[str]:
        """Selects the `names` that are special tokens."""
        added = self._backend.get_added_tokens_decoder().values()
        return frozenset(t.content for t in added if t.special and t.content in names)

    def context(
        self,
        prompt: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        shown: frozenset[str] = frozenset(),
    ) -> tuple[int, ...]:
        """Last tokens of a prompt, which affect the text of a completion's first tokens. Passed to
        `detokenizer` as `context`.

        Args:
            prompt: token ids of the prompt.
            skip_special_tokens: as for `detokenizer`.
            shown: as for `detokenizer`.
        """
        skipped = self._skipped(skip_special_tokens, shown) or frozenset()
        tokens = (token_id for token_id in reversed(prompt) if token_id not in skipped)
        return tuple(itertools.islice(tokens, TRIM_TOKENS + CHARACTER_TOKENS))[::-1]

    def detokenizer(
        self,
        *,
        context: Sequence[int] = (),
        skip_special_tokens: bool = True,
        shown: frozenset[str] = frozenset(),
    ) -> Detokenizer:
        """Creates an incremental detokenizer for one completion.

        Args:
            context: result of `context` for the prompt; empty to decode without a prompt.
            skip_special_tokens: whether special tokens are omitted.
            shown: special tokens that are never omitted. If there are any, all special tokens are
                shown unless the vocabulary is byte-level.
        """
        pending = pending_of([self.token_bytes(number) for number in context[-CHARACTER_TOKENS:]])
        if self._is_bytes:
            known = self._token_bytes.setdefault((skip_special_tokens, shown), {})
            return ByteDetokenizer(
                self._backend,
                known,
                skip_special_tokens=skip_special_tokens,
                shown=shown,
                pending=pending,
            )
        skipped = self._skipped(skip_special_tokens, shown)
        return StreamDetokenizer(self._backend, context=context, pending=pending, skipped=skipped)

    def _skipped(self, skip_special_tokens: bool, shown: frozenset[str]) -> frozenset[int] | None:
        """Ids of tokens without text; None if special tokens are decoded to their names."""
        return self.special_token_ids if skip_special_tokens and not shown else None

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **chat_template_kwargs: Any,
    ) -> str:
        """Renders the prompt text of a chat; encode it with `add_special_tokens=False`.

        Raises:
            ValueError: the checkpoint has no chat template, or the template rejects the messages.
        """
        if self._template is None:
            raise ValueError(
                "this model has no chat template: use /v1/completions, or start the server with "
                "--chat-template"
            )
        return self._template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            **chat_template_kwargs,
        )


def load_tokenizer(model: str) -> Tokenizer:
    """Loads the tokenizer of a checkpoint folder, or of a Hub repository by name.

    Raises:
        Unavailable: the folder or its tokenizer.json does not exist, or the Hub is unreachable.
        ValueError: the repository cannot be downloaded, or has no tokenizer.json.
    """
    folder = checkpoint_folder(model)
    path = folder / "tokenizer.json"
    if not path.is_file():
        kind = Unavailable if local_folder(model) else ValueError
        raise kind(
            f"no tokenizer.json in {folder}: save the checkpoint with a fast tokenizer "
            "(tokenizer.save_pretrained in transformers)"
        )
    return Tokenizer(
        tokenizers.Tokenizer.from_file(str(path)),
        chat_template=_find_chat_template(folder),
        special_tokens=special_tokens(folder),
        response_template=read_json(folder / "tokenizer_config.json").get("response_template"),
    )


def special_tokens(folder: Path) -> dict[str, str]:
    """Special tokens of a checkpoint's tokenizer by role (`eos_token`, ...).

    Raises ValueError if one of the files is not a JSON object.
    """
    config = {
        **read_json(folder / "special_tokens_map.json"),
        **read_json(folder / "tokenizer_config.json"),
    }
    tokens: dict[str, str] = {}
    for key in SPECIAL_TOKEN_KEYS:
        value = config.get(key)
        if isinstance(value, Mapping):  # an added token with flags
            value = value.get("content")
        if isinstance(value, str):
            tokens[key] = value
    return tokens


def checkpoint_folder(model: str) -> Path:
    """Folder of a checkpoint, or a local snapshot of the small text files of a Hub repository.

    Raises the errors of `local_folder` and `download` in `worker.protocol.hub`.
    """
    return local_folder(model) or download(model, ["*.json", "*.jinja"])


def read_json(path: Path) -> dict[str, Any]:
    """Object in a JSON file; empty if the file does not exist. Raises ValueError for
    other content."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{path} is not valid JSON ({error}): fix it or download it again"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must contain a JSON object: fix it or download it again")
    return content


def _find_chat_template(folder: Path) -> str | None:
    """Chat template of a checkpoint. A separate file overrides the one in the
    tokenizer's config."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = read_json(folder / "chat_template.json").get("chat_template")
    template = template or read_json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):  # several named templates
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _decoder_kinds(backend: tokenizers.Tokenizer) -> list[str]:
    """Types of a tokenizer's decoders in order of application; empty if there is no decoder."""
    if backend.decoder is None:
        return []
    kinds: list[str] = []
    left = [json.loads(backend.decoder.__getstate__())]
    while left:
        decoder = left.pop()
        left += reversed(decoder.get("decoders", ()))
        if decoder["type"] != "Sequence":
            kinds.append(decoder["type"])
    return kinds
