"""EOS tokens of a model, from all files of a checkpoint that specify any."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from worker.protocol.analyzed import analyzed
from worker.protocol.text.tokenizer import checkpoint_folder, special_tokens


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Vocabulary(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]] = msgspec.field(default_factory=dict)
    """Ids by name, or (name, score) pairs in the order of ids (Unigram)."""


class _TokenizerFile(msgspec.Struct):
    """Parts of tokenizer.json that define token ids."""

    model: msgspec.Raw
    """JSON of a _Vocabulary of about 150,000 tokens, which is only decoded if necessary: it rarely
    contains special tokens."""
    added_tokens: list[_AddedToken] = []


def eos_token_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    """EOS tokens specified in config.json or generation_config.json; empty if unset.

    Raises:
        ValueError: eos_token_id is neither a token id nor a list of token ids.
    """
    value = config.get("eos_token_id")
    if value is None:
        return ()
    token_ids = value if isinstance(value, list) else [value]
    if not all(type(token_id) is int for token_id in token_ids):
        raise ValueError(
            f"eos_token_id must be a token id or a list of them, got {value!r:.80}: fix it in "
            "config.json or generation_config.json"
        )
    return tuple(token_ids)


def tokenizer_eos_token_id(model: str) -> int | None:
    """EOS token of a checkpoint's tokenizer (`eos_token`), with which fine-tuned chat models may
    end their turns; None if unset.

    Parses tokenizer.json as JSON, which takes a tenth of the time needed to load the tokenizer.

    Raises:
        ValueError: the folder does not exist, the model is not on the Hub, or a file is invalid.
    """
    folder = checkpoint_folder(model)
    name = special_tokens(folder).get("eos_token")
    path = folder / "tokenizer.json"
    if name is None or not path.is_file():
        return None
    try:
        file = msgspec.json.decode(path.read_bytes(), type=analyzed(_TokenizerFile))
        for token in file.added_tokens:
            if token.content == name:
                return token.id
        vocab = msgspec.json.decode(file.model, type=analyzed(_Vocabulary)).vocab
    except msgspec.DecodeError as error:
        raise ValueError(
            f"{path} is not a valid tokenizer file ({error}): download it again"
        ) from error
    if isinstance(vocab, dict):
        return vocab.get(name)
    return next((token_id for token_id, (piece, _) in enumerate(vocab) if piece == name), None)
