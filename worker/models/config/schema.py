"""Types of the fields of a model family's schema, and the reader that fills a schema from
config.json. Does not import torch.

A schema is a msgspec Struct whose fields are keys of config.json: the type lists the supported
values, and the default is the value of a missing key. Any other key may change the model's outputs,
so a checkpoint that has one is rejected, and the message names the key. Exceptions: keys in
`HARMLESS` or in the family's `harmless`, keys that begin with `_`, and unknown keys that are null,
false, zero or empty. null counts as missing, unless the field's type includes None.
"""

from __future__ import annotations

import json
import sys
import typing
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, inspect

from worker.protocol.analyzed import analyzed

_Schema = TypeVar("_Schema", bound=msgspec.Struct)
RawConfig = dict[str, Any]
"""The content of config.json."""


def words(names: str) -> frozenset[str]:
    """The names in a text, separated by whitespace, as a set."""
    return frozenset(names.split())


HARMLESS = words(
    """
    architectures model_type auto_map transformers_version use_cache bos_token_id
    pad_token_id sep_token_id decoder_start_token_id unk_token_id id2label label2id problem_type
    finetuning_task task_specific_params tokenizer_class prefix return_dict output_attentions
    output_hidden_states torchscript chunk_size_feed_forward attention_dropout
    attention_probs_dropout_prob hidden_dropout hidden_dropout_prob embd_pdrop resid_pdrop
    initializer_range pretraining_tp use_flash_attn gradient_checkpointing unsloth_fixed
    unsloth_version model_name pruned_heads tf_legacy_loss use_bfloat16 max_window_layers
    max_sequence_length internal_version is_llama_config transformers.js_config
    cache_implementation attn_implementation custom_pipelines
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores
    return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    """
)
"""Keys that do not affect logits: bookkeeping, training, how transformers runs the model and, in
the last lines, its legacy generation keys. pretraining_tp only splits sums; max_window_layers has
an effect in families that have it as a field."""
ROUTER_KEYS = words("output_router_logits router_aux_loss_coef")
"""Keys that only concern training, in families with experts."""


def only(*values: object) -> Meta:
    """Metadata of a field that supports only these values. It is needed for bools and floats, which
    msgspec does not support in Literal, and for fields that subclasses redeclare with other values.
    """
    return Meta(extra={"only": values})


Count = Annotated[int, Meta(ge=1)]
Index = Annotated[int, Meta(ge=0)]
"""A non-negative integer: an index, or a count that may be 0."""
Number = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
One = Annotated[float, Meta(ge=1, le=1)]
"""A factor that must be 1, since scaling by it is not supported."""
Yes = Annotated[bool, only(True)]
No = Annotated[bool, only(False)]


def architectures(raw: Mapping[str, Any]) -> list[Any]:
    """The value of `architectures`; raises ValueError if it is not a list."""
    names = raw.get("architectures") or []
    if not isinstance(names, list):
        raise ValueError(
            f"architectures in config.json must be a list of class names, got {short(names)}: "
            "fix it"
        )
    return names


def is_harmless(key: str) -> bool:
    """Whether a key has no effect in any family."""
    return key in HARMLESS or key.startswith("_")


def read_fields(
    schema: type[_Schema],
    raw: Mapping[str, Any],
    harmless: frozenset[str],
    spelled: Mapping[str, str] | None = None,
) -> _Schema:
    """Fills a schema from the content of config.json.

    Args:
        schema: the struct.
        raw: keys and values of config.json.
        harmless: keys that have no effect, besides those common to all families.
        spelled: config.json names of renamed fields, for messages.

    Raises:
        ValueError: a key is unknown or missing, or its value is not supported; the message names
            the key.
    """
    types = _types(schema)
    values = dict[str, Any]()
    for key, value in raw.items():
        if key in types:
            if value is not None or _allows_none(types[key]):
                values[key] = value
        elif value and key not in harmless and not is_harmless(key):
            raise ValueError(
                f"{key} = {short(value)} in config.json is not supported: it may change the "
                "model's outputs; use another checkpoint, or remove the key if you know that it "
                "does not"
            )
    try:
        filled = msgspec.convert(values, analyzed(schema))
    except msgspec.ValidationError as error:
        raise _explained(schema, values, spelled or {}, error) from None
    for key, value in values.items():
        if not accepts(schema, key, value):
            raise _unsupported((spelled or {}).get(key, key), value, types[key])
    return filled


def accepts(schema: type[msgspec.Struct], key: str, value: object) -> bool:
    """Whether a field of a schema supports a value."""
    hint = _types(schema)[key]
    allowed = _allowed(hint)
    try:
        msgspec.convert(value, analyzed(hint))
    except msgspec.ValidationError:
        return False
    return not allowed or value in allowed


def short(value: object) -> str:
    """A value of a JSON file for a message, as it is written there, in at most 80 characters."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 80 else text[:77] + "..."


def _explained(
    schema: type[msgspec.Struct],
    values: Mapping[str, Any],
    spelled: Mapping[str, str],
    error: msgspec.ValidationError,
) -> ValueError:
    """The error for the first unsupported value, or for a missing key."""
    types = _types(schema)
    for key, value in values.items():
        if not accepts(schema, key, value):
            return _unsupported(spelled.get(key, key), value, types[key])
    key = next(key for key in types if f"`{key}`" in str(error))
    allowed = _described(types[key])
    return ValueError(f"{key} is missing from config.json: add it; it must be {allowed}")


def _unsupported(key: str, value: object, hint: Any) -> ValueError:
    return ValueError(
        f"{key} = {short(value)} in config.json is not supported: it must be {_described(hint)}"
    )


@cache
def _types(schema: type[msgspec.Struct]) -> dict[str, Any]:
    """Types of a schema's fields, by key."""
    hints = typing.get_type_hints(schema, include_extras=True)
    return {key: hints[key] for key in schema.__struct_fields__}


@cache
def _allowed(hint: Any) -> tuple[object, ...]:
    """The supported values of a field that are listed by `only`; empty for other fields."""
    kind = inspect.type_info(hint)
    return kind.extra["only"] if isinstance(kind, inspect.Metadata) and kind.extra else ()


@cache
def _allows_none(hint: Any) -> bool:
    kind = inspect.type_info(hint)
    return isinstance(kind, inspect.UnionType) and kind.includes_none


def _described(hint: Any) -> str:
    """The values that a field supports, in words."""
    return _in_words(inspect.type_info(hint))


def _in_words(kind: inspect.Type) -> str:
    match kind:
        case inspect.Metadata(extra={"only": values}):
            return " or ".join(map(short, values))
        case inspect.Metadata(type=inner):
            return _in_words(inner)
        case inspect.LiteralType(values=values):
            return " or ".join(map(short, values))
        case inspect.UnionType(types=types):
            kinds = (part for part in types if not isinstance(part, inspect.NoneType))
            return " or ".join(map(_in_words, kinds))
        case inspect.IntType(ge=least, le=most) | inspect.FloatType(ge=least, le=most) if (
            least is not None and least == most
        ):
            return f"{least:g}"
        case inspect.IntType(ge=int(least), le=int(most)):
            return f"an integer from {least} to {most}"
        case inspect.IntType(ge=1):
            return "a positive integer"
        case inspect.IntType():
            return "a non-negative integer"
        case inspect.FloatType():
            return "a non-negative number"
        case inspect.BoolType():
            return "true or false"
        case inspect.StrType():
            return "a string"
        case inspect.ListType(item_type=inspect.AnyType()):
            return "a list"
        case inspect.ListType(item_type=item):
            return f"a list in which each item is {_in_words(item)}"
        case _:
            return "an object"
