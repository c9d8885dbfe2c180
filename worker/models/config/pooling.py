"""Pooling configuration of a checkpoint: its task, pooling and head, from config.json and the files
of sentence-transformers. Does not import torch."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from worker.models.config.checkpoint import read_json
from worker.models.config.encoders import ENCODERS, EncoderConfig
from worker.models.config.multimodal import TensorNames
from worker.models.config.schema import RawConfig, architectures, short, words
from worker.protocol.analyzed import analyzed
from worker.protocol.pooling import Activation, PoolingInfo, PoolingOptions, PoolingType
from worker.protocol.text.tokenizer import load_tokenizer

_CAUSAL, _CLASSIFIER = "ForCausalLM", "ForSequenceClassification"
_MASKED, _BASE = "ForMaskedLM", "Model"
_KINDS: Mapping[str, tuple[str, ...]] = {
    _CAUSAL: (_CAUSAL,),
    _CLASSIFIER: (_CAUSAL, _BASE),
    _MASKED: (_BASE,),
    _BASE: (_CAUSAL, _BASE),
}
"""Supported suffixes of a checkpoint's `architectures`, mapped to the suffixes of the model classes
that may implement it."""
_MODES: Mapping[str, PoolingType] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
}
"""Keys of sentence-transformers' pooling configuration, mapped to the pooling methods that they
enable."""
_MODE_NAMES: Mapping[str, PoolingType] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
"""Values of sentence-transformers' key `pooling_mode`, which newer versions use."""
_LOWER: Mapping[str, PoolingType] = {
    name: kind for kind in _MODES.values() for name in (kind, kind.upper())
}
"""Pooling methods by their name in --pooler-config."""
_MODULES_FILE = "modules.json"
"""File that lists the modules of a sentence-transformers checkpoint."""
_LENGTH_FILES = tuple(f"sentence_{kind}_config.json" for kind in ("bert", "roberta", "xlm-roberta"))
"""Files of sentence-transformers that have the maximum number of tokens; the first one counts."""
_MODULES = ("Transformer", "Pooling", "Normalize")
"""Modules of sentence-transformers that are supported, by the last part of their type."""
_FOLDER = re.compile(r"[\w.-]*[\w-][\w.-]*")
_MAX_LABELS = 100_000
"""Maximum number of labels, which bounds the memory for their names."""
_DEFAULT_LABELS = 2
"""Number of labels if config.json has none (transformers)."""
_PARTS = ("embed_tokens.", "layers.", "norm.")
"""Prefixes of tensor names in checkpoints saved without an LM head."""
_LM_HEADS = ("lm_head.", "embed_out.", "output.")
"""Prefixes of LM head names in all families."""
_OWN_KEYS = words(
    """
    num_labels sentence_transformers is_matryoshka matryoshka_dimensions classifier_from_token
    is_original_qwen3_reranker
    """
)
"""Keys of config.json that concern pooling only."""
_ANSWERS = ("no", "yes")
"""Tokens whose logits are compared to compute a reranker's score."""
_RERANKER_TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
"""Prompt of Qwen3-Reranker (its model card)."""
_RERANKER_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""Default instruction of Qwen3-Reranker (its model card)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolerConfig:
    """How a model's hidden states are pooled into a vector."""

    info: PoolingInfo
    """Properties that gateways also use."""
    token_ids: tuple[int, ...] = ()
    """Tokens whose LM head rows form the classification head; empty for embeddings, or if the
    checkpoint has a head."""
    max_seq_length: int | None = None
    """Maximum number of tokens in a prompt, including special tokens, from the files of
    sentence-transformers; None if they have none."""

    def of_size(self, hidden_size: int) -> PoolerConfig:
        """The configuration for a model with hidden states of this size."""
        if self.info.task != "embed":
            return self
        return replace(self, info=msgspec.structs.replace(self.info, size=hidden_size))

    def tensors(self, *, tied: bool) -> TensorNames:
        """Names of tensors in the checkpoint: checkpoints without an LM head omit `model.`.

        Args:
            tied: whether the LM head shares the embedding's weight.
        """
        skipped = list[str]()
        if not self.token_ids or tied:
            skipped += _LM_HEADS
        if self.info.task == "embed":
            skipped.append("score.")
        renamed = tuple((part, f"model.{part}") for part in _PARTS)
        return TensorNames(renamed=renamed, skipped=tuple(skipped))

    def encoder_tensors(self, encoder: EncoderConfig) -> TensorNames:
        """Names of an encoder's tensors, without the prefix used in checkpoints with a head."""
        skipped = ["cls.", "lm_head.", "decoder.", "embeddings.position_ids"]
        if self.info.task == "embed":
            skipped += ["classifier.", "head."]
        if self.info.task == "embed" or not encoder.has_pair_types:
            skipped.append("pooler.")
        return TensorNames(renamed=((encoder.base, ""),), skipped=tuple(skipped))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Head:
    """A classification head."""

    labels: list[str]
    activation: Activation
    token_ids: tuple[int, ...] = ()


def read_pooler(
    raw: RawConfig, folder: Path, options: PoolingOptions, known: Collection[str]
) -> tuple[RawConfig, PoolerConfig | None]:
    """Reads the pooling configuration of a checkpoint.

    Args:
        raw: the content of config.json.
        folder: the checkpoint's folder.
        options: the requested task and pooling.
        known: supported values of `architectures` for generative models.

    Returns:
        config.json as the generative model of the same family would have it, and the pooling
        configuration. For a generative model, the unchanged config.json and None.

    Raises:
        ValueError: the checkpoint does not support the task, or its pooling is not supported.
    """
    chosen = _chosen(raw, options, known, has_modules=(folder / _MODULES_FILE).is_file())
    if chosen is None:
        return raw, None
    task, causal, kind = chosen
    modules = _modules(folder)
    head = None if task == "embed" else _head(raw, folder, kind, task)
    is_encoder = not causal.endswith(_CAUSAL)
    default: PoolingType = "cls" if is_encoder else "last"
    if head is not None and raw.get("classifier_pooling") == "mean":
        default = "mean"
    pooling_type, normalize = _pooling(folder, modules, options, default)
    prompts, default_prompt = _prompts(folder) if head is None else ({}, "")
    info = PoolingInfo(
        task="embed" if head is None else "classify",
        pooling_type=pooling_type,
        size=0 if head is None else len(head.labels),
        normalize=normalize,
        activation="none" if head is None else head.activation,
        labels=() if head is None else tuple(head.labels),
        dimensions=_dimensions(raw),
        prompts=tuple(prompts.items()),
        default_prompt=default_prompt,
        pair_template=_RERANKER_TEMPLATE if head is not None and head.token_ids else "",
        instruction=_RERANKER_INSTRUCTION if head is not None and head.token_ids else "",
        is_bidirectional=is_encoder,
    )
    rest = {key: value for key, value in raw.items() if key not in _OWN_KEYS}
    return {**rest, "architectures": [causal]}, PoolerConfig(
        info=info,
        token_ids=() if head is None else head.token_ids,
        max_seq_length=_max_seq_length(folder),
    )


class _Chosen(NamedTuple):
    """The task that was chosen for a checkpoint, and the architecture that runs it."""

    task: str
    architecture: str
    """The generative architecture of the same family, or the encoder."""
    suffix: str
    """Suffix of the checkpoint's architecture."""


def _chosen(
    raw: RawConfig, options: PoolingOptions, known: Collection[str], *, has_modules: bool
) -> _Chosen | None:
    """The task of a pooling model, and the architecture that runs it; None if the model generates
    text. Raises ValueError if the checkpoint does not support the requested task."""
    names = architectures(raw)
    found = next(filter(None, (_variant(name, known) for name in names)), None)
    task = options.requested
    if found is None and task not in ("auto", "generate"):
        raise ValueError(
            f"--task {task} is not supported for architectures {names} in config.json: use a "
            "checkpoint of a supported language model"
        )
    if found is None or task == "generate":
        return None
    architecture, suffix = found
    if task in ("auto", "pooling"):
        if task == "auto" and suffix == _CAUSAL and not has_modules:
            return None
        task = "classify" if suffix == _CLASSIFIER else "embed"
    return _Chosen(task, architecture, suffix)


def _variant(name: object, known: Collection[str]) -> tuple[str, str] | None:
    """The generative architecture of the same family, or the encoder, and the suffix of `name`;
    None if the family is not supported."""
    for suffix, kinds in _KINDS.items():
        if isinstance(name, str) and name.endswith(suffix):
            stem = name.removesuffix(suffix)
            found = (
                stem + kind
                for kind in kinds
                if stem + kind in (ENCODERS if kind == _BASE else known)
            )
            return next(((name, suffix) for name in found), None)
    return None


def _head(raw: RawConfig, folder: Path, kind: str, task: str) -> _Head:
    """The classification head for a task. Raises ValueError if the checkpoint has none."""
    if kind == _CLASSIFIER:
        return _classifier(raw)
    if task == "classify" or kind != _CAUSAL:
        raise ValueError(
            f"--task {task} needs a classification head, but architectures in config.json is "
            f"{raw['architectures']}: use a *ForSequenceClassification checkpoint, --task embed, "
            "or, for a reranker that answers yes or no, --task score"
        )
    tokenizer = load_tokenizer(str(folder))
    token_ids = [tokenizer.token_id(answer) for answer in _ANSWERS]
    if None in token_ids:
        raise ValueError(
            f"--task score needs the tokens {' and '.join(_ANSWERS)}, which the tokenizer of "
            f"{folder} does not have: use a *ForSequenceClassification checkpoint"
        )
    ids = tuple(token_id for token_id in token_ids if token_id is not None)
    return _Head(labels=list(_ANSWERS), activation="softmax", token_ids=ids)


def _classifier(raw: RawConfig) -> _Head:
    names, key = raw.get("id2label"), "num_labels" if raw.get("num_labels") else "id2label"
    if names is not None and not isinstance(names, dict):
        raise ValueError(f"id2label in config.json must be an object, got {short(names)}: fix it")
    names = names if names is not None else dict.fromkeys(range(_DEFAULT_LABELS))
    count = raw.get("num_labels") or len(names)
    if not isinstance(count, int) or not 1 <= count <= _MAX_LABELS:
        raise ValueError(
            f"{key} in config.json must define 1 to {_MAX_LABELS} labels, got {short(count)}: "
            "fix it"
        )
    labels = [str(names.get(str(index), f"LABEL_{index}")) for index in range(count)]
    kind, own = raw.get("problem_type"), raw.get("sentence_transformers")
    function = str(own.get("activation_fn", "")) if isinstance(own, dict) else ""
    activation: Activation = "sigmoid" if count == 1 else "softmax"
    if kind == "regression" or function.endswith("Identity"):
        activation = "none"
    elif kind == "multi_label_classification" or function.endswith("Sigmoid"):
        activation = "sigmoid"
    return _Head(labels=labels, activation=activation)


def _dimensions(raw: RawConfig) -> tuple[int, ...]:
    """Supported numbers of dimensions; empty if any number is supported. Raises ValueError if they
    are malformed."""
    given = raw.get("matryoshka_dimensions") or []
    try:
        return tuple(msgspec.convert(given, analyzed(list[int])))
    except msgspec.ValidationError as error:
        raise ValueError(
            f"matryoshka_dimensions in config.json must be a list of integers ({error}): fix it"
        ) from None


def _modules(folder: Path) -> list[tuple[str, str]]:
    """Kind and folder of each module in modules.json; empty if there is no such file.

    Raises:
        ValueError: the file is malformed, or has a module that is not supported.
    """
    path = folder / _MODULES_FILE
    if not path.is_file():
        return []
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        found = [(str(entry["type"]).rpartition(".")[2], str(entry["path"])) for entry in entries]
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}): fix it") from error
    except (TypeError, KeyError) as error:
        raise ValueError(
            f"{path} must be a list of objects with 'type' and 'path': fix it"
        ) from error
    for kind, place in found:
        if kind not in _MODULES:
            raise ValueError(
                f"{path} has a module {kind}, which is not supported (supported: "
                f"{', '.join(_MODULES)}): use another checkpoint"
            )
        # HAZARD: a checkpoint is untrusted input; no other files of this machine are read.
        if place and not _FOLDER.fullmatch(place):
            raise ValueError(
                f"{path} refers to the folder {place!r:.200}, but modules must be in subfolders of "
                "the checkpoint: it is corrupt or malicious; use another checkpoint"
            )
    return found


def _pooling(
    folder: Path, modules: list[tuple[str, str]], options: PoolingOptions, default: PoolingType
) -> tuple[PoolingType, bool]:
    """Pooling and normalization: from the options if they are set, otherwise from the checkpoint or
    the default."""
    pooling_type = default
    if options.pooling_type is not None:
        pooling_type = _LOWER[options.pooling_type]
    normalize = not modules or any(kind == "Normalize" for kind, _ in modules)
    place = next((place for kind, place in modules if kind == "Pooling"), None)
    if options.pooling_type is None and place is not None:
        pooling_type = _pooling_type(folder / place / "config.json")
    return pooling_type, normalize if options.normalize is None else options.normalize


def _pooling_type(path: Path) -> PoolingType:
    """Pooling from sentence-transformers' configuration. Raises ValueError if it is not
    supported."""
    raw = read_json(path)
    chosen = [
        key for key, value in raw.items() if key.startswith("pooling_mode_") and value is True
    ]
    if not chosen and isinstance(name := raw.get("pooling_mode"), str):
        found = _MODE_NAMES.get(name)
    else:
        found = _MODES.get(chosen[0]) if len(chosen) == 1 else None
    if found is None or (raw.get("include_prompt") is False and found == "mean"):
        raise ValueError(
            f"the pooling in {path} is not supported (supported: last token, mean of all tokens, "
            "first token): to use one of these instead, set pooling_type in --pooler-config"
        )
    return found


def _prompts(folder: Path) -> tuple[dict[str, str], str]:
    """Text prefixes by name, and the name of the default prefix; both empty if there are none.

    Raises:
        ValueError: config_sentence_transformers.json is malformed.
    """
    path = folder / "config_sentence_transformers.json"
    if not path.is_file():
        return {}, ""
    raw: dict[str, Any] = read_json(path)
    try:
        prompts = msgspec.convert(raw.get("prompts") or {}, analyzed(dict[str, str]))
    except msgspec.ValidationError as error:
        raise ValueError(
            f"prompts in {path} must map names to strings ({error}): fix it"
        ) from error
    default = raw.get("default_prompt_name") or ""
    if default and default not in prompts:
        raise ValueError(
            f"default_prompt_name {short(default)} in {path} is not in prompts: fix it"
        )
    return prompts, str(default)


def _max_seq_length(folder: Path) -> int | None:
    """The maximum number of tokens in the files of sentence-transformers; None if they have none.
    Raises ValueError if it is malformed."""
    path = next((path for name in _LENGTH_FILES if (path := folder / name).is_file()), None)
    length = None if path is None else read_json(path).get("max_seq_length")
    if length is not None and (type(length) is not int or length < 1):
        raise ValueError(
            f"max_seq_length in {path} must be a positive integer or null, got {short(length)}: "
            "fix it"
        )
    return length
