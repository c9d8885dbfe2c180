"""Model configuration: architecture parameters of a checkpoint, from its config.json. Does not
import torch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from worker.models.config.block_config import BlockSparseConfig
from worker.models.config.canvas_config import CanvasConfig
from worker.models.config.checkpoint import check_files, read_json, resolve_checkpoint
from worker.models.config.encoders import ENCODERS
from worker.models.config.families import FAMILIES, read_family
from worker.models.config.family import FamilyConfig, HeadSizes
from worker.models.config.mamba_config import MambaConfig
from worker.models.config.mla_config import MlaConfig
from worker.models.config.moe_config import MoeConfig, checked
from worker.models.config.mtp_config import MtpConfig
from worker.models.config.multimodal import TensorNames
from worker.models.config.pooling import PoolerConfig, read_pooler
from worker.models.config.quantization import QuantizationConfig
from worker.models.config.quantization_formats import read_quantization
from worker.models.config.rope_config import (
    RopeConfig,
    parse_rope,
    parse_window_rope,
    without_shares,
)
from worker.models.config.schema import RawConfig, short
from worker.protocol.pooling import PoolingOptions
from worker.protocol.text.end_tokens import eos_token_ids

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Configuration of one checkpoint: sizes, rotary embedding, biases, limits and EOS tokens."""

    architecture: str
    folder: Path
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    """Number of leading dimensions per head that have rotary embedding."""
    full_heads: HeadSizes | None = None
    """Heads of full-attention layers, if they differ from those of other layers."""
    layer_heads: tuple[int, ...] | None = None
    """Number of query heads per layer; None if all layers have `num_heads`."""
    value_dim: int | None = None
    """Dimensions of a value, if they differ from `head_dim`; otherwise None."""
    rms_norm_eps: float
    rope: RopeConfig
    window_rope: RopeConfig | None = None
    """Rotary embedding of sliding-window layers, if it differs from `rope`."""
    qkv_bias: bool
    """Whether the q, k and v projections have biases."""
    output_bias: bool
    """Whether the attention's output projection has a bias."""
    mlp_bias: bool
    """Whether the projections of the MLP have biases."""
    qk_norm: bool
    """Whether each head of q and k is normalized (QK norm)."""
    windows: tuple[int | None, ...]
    """Sliding window per layer: number of tokens that a token attends to, including itself; None
    for full attention."""
    has_chunks: bool | None = None
    """True if attention is chunked, with windows that begin at multiples of their length; otherwise
    None."""
    rotating: tuple[bool, ...] | None = None
    """Whether queries and keys have rotary embedding, per layer; None if all layers do, or if the
    model class decides based on the layers' windows."""
    linear_layers: frozenset[int] | None = None
    """Layers that keep a state per request (linear attention, convolutions); None if there are
    none."""
    cache_sources: Mapping[int, int] | None = None
    """Layers that have no keys and values of their own, and the earlier layers whose KV caches they
    read; None if there are none."""
    divided: Mapping[str, int] | None = None
    """Additional sizes that must be divided evenly among the ranks (besides attention heads, MLPs
    and experts), by description; None if there are none."""
    attention_cap: float = 0.0
    """Soft cap of attention scores (by tanh); 0 if there is none."""
    has_sinks: bool = False
    """Whether heads have attention sinks."""
    tie_word_embeddings: bool
    max_model_len: int
    """Maximum sequence length, in tokens: the checkpoint's context length, or less if a longer one
    would need attention that is not implemented, such as a sliding window."""
    max_model_len_reason: str
    """Keys of the checkpoint's files from which `max_model_len` is derived, for messages."""
    eos_token_ids: tuple[int, ...]
    dtype: str | None = None
    """Data type of the stored weights, if config.json has it."""
    block_size: int = 1
    """Block size of a block-diffusion model; 1 for an autoregressive model."""
    mask_token_id: int | None = None
    """Token at positions that are not decoded yet; None for an autoregressive model."""
    edit_token_ids: tuple[int, int] | None = None
    """Tokens that delete and insert a position of a block; None if the model has none."""
    canvas: CanvasConfig | None = None
    """Size and generation of canvases; None for models that do not generate any."""
    moe: MoeConfig | None = None
    """Mixture of experts; None for a dense model."""
    mla: MlaConfig | None = None
    """Multi-head latent attention; None for other attention."""
    block_sparse: BlockSparseConfig | None = None
    """Block-sparse attention; None for other attention."""
    mamba: MambaConfig | None = None
    """Mamba-2 layers; None if there are none."""
    quantization: QuantizationConfig | None = None
    """Quantization format of linear weights; None if they are not quantized."""
    extra: Mapping[str, Any] | None = None
    """Values of keys that only the family's class reads (`FamilyConfig.extra`)."""
    tensors: TensorNames | None = None
    """Tensor names in this checkpoint that differ from the family's; None if none do."""
    pooling: PoolerConfig | None = None
    """How hidden states are pooled into a vector; None for a model that generates text."""
    mtp: MtpConfig | None = None
    """Head for multi-token prediction that the checkpoint may have; None if it is not supported for
    this family."""
    loads_mtp: bool = False
    """Whether the MTP head is loaded; otherwise its tensors are skipped."""

    @classmethod
    def parse(
        cls,
        raw: RawConfig,
        folder: Path,
        pooling: PoolingOptions = PoolingOptions(),  # noqa: B008  # frozen
    ) -> ModelConfig:
        """Reads config.json's content, and the EOS tokens in the folder's other files.

        Raises:
            ValueError: a value is malformed or not supported; the message names the key.
        """
        raw, pooler = read_pooler(raw, folder, pooling, FAMILIES)
        family, tensors = _read_family(raw, pooler)
        return cls.of_family(family, raw, folder, tensors=tensors, pooler=pooler)

    @classmethod
    def of_family(
        cls,
        family: FamilyConfig,
        raw: RawConfig,
        folder: Path,
        *,
        tensors: TensorNames | None = None,
        pooler: PoolerConfig | None = None,
    ) -> ModelConfig:
        """The configuration of a checkpoint in `folder`, whose config.json (`raw`) was read with
        its family's schema. Raises ValueError, which names the key, for an unsupported value."""
        check_files(folder)
        rope, window_rope = _ropes(family)
        quantization = _quantization(family, folder)
        mla, moe, mamba = family.mla(rope), _experts(family), family.mamba()
        windows, biases = family.windows(), family.biases()
        block_size, mask_token_id = family.block_diffusion()
        canvas = _canvas(family, folder)
        limited = windows if block_size > 1 else ()
        limit, reason = _length_limit(family, rope, limited, canvas, pooler)
        return cls(
            architecture=family.architecture,
            folder=folder,
            vocab_size=family.vocab_size,
            hidden_size=family.hidden_size,
            intermediate_size=family.intermediate_size,
            num_layers=family.num_hidden_layers,
            num_heads=family.num_attention_heads,
            num_kv_heads=family.kv_heads(),
            head_dim=family.head_size() if mla is None else mla.query_dim,
            rotary_dim=family.rotary_size(),
            mla=mla,
            block_sparse=family.block_sparse(),
            mamba=mamba,
            moe=moe,
            rms_norm_eps=family.rms_norm_eps,
            rope=rope,
            window_rope=window_rope,
            qkv_bias=biases.qkv,
            output_bias=biases.output,
            mlp_bias=biases.mlp,
            qk_norm=family.has_qk_norm(),
            windows=windows,
            has_chunks=family.has_chunks or None,
            rotating=family.rotating(),
            full_heads=family.full_heads(),
            layer_heads=family.layer_heads(),
            value_dim=family.value_size(),
            linear_layers=family.linear_layers(),
            cache_sources=family.cache_sources(),
            divided=_divided(family, mamba) or None,
            attention_cap=family.attention_cap(),
            has_sinks=family.has_sinks,
            tie_word_embeddings=family.tie_word_embeddings,
            max_model_len=limit // block_size * block_size,
            max_model_len_reason=reason,
            eos_token_ids=_eos_token_ids(raw, family, folder),
            dtype=family.stored_dtype(),
            block_size=block_size,
            mask_token_id=mask_token_id,
            edit_token_ids=family.edit_tokens(),
            canvas=canvas,
            quantization=quantization,
            extra=family.extra(),
            tensors=_with_skipped_tensors(tensors, family, quantization),
            pooling=pooler and pooler.of_size(family.hidden_size),
            mtp=family.mtp(),
        )

    @property
    def diffusion_size(self) -> int:
        """Number of tokens that a block-diffusion model generates together: the size of a block or
        a canvas; 1 for an autoregressive model."""
        return self.block_size if self.canvas is None else self.canvas.length

    @property
    def num_ahead(self) -> int:
        """Number of positions computed beyond the maximum request length: the positions of a
        canvas, or 0 for models without canvases."""
        return 0 if self.canvas is None else self.canvas.length

    def windows_within(self, max_model_len: int) -> tuple[int, ...]:
        """Sliding windows per layer in sequences of at most `max_model_len` tokens: number of
        positions that a query attends to, including its own. 0 for full attention, to which a
        window of at least `max_model_len` is equal."""
        return tuple(
            window if window is not None and window < max_model_len else 0
            for window in self.windows
        )

    def selects_tokens_within(self, max_model_len: int) -> bool:
        """Whether queries attend to a selection of tokens (sparse attention) in sequences of
        `max_model_len` tokens."""
        indexer = self.block_sparse if self.mla is None else self.mla.indexer
        return indexer is not None and indexer.top_k < max_model_len

    @property
    def is_bidirectional(self) -> bool:
        """Whether tokens also attend to later ones (encoders)."""
        return self.pooling is not None and self.pooling.info.is_bidirectional

    @property
    def head_dims(self) -> tuple[int, ...]:
        """Head dimensions of all layers, ascending, without duplicates."""
        return tuple(sorted({self.head_dim, self.for_full_layers().head_dim}))

    def for_full_layers(self) -> ModelConfig:
        """Configuration of full-attention layers, whose heads may have different sizes."""
        full = self.full_heads
        if full is None:
            return self
        return replace(
            self,
            head_dim=full.head_dim,
            num_kv_heads=full.num_kv_heads,
            rotary_dim=full.rotary_dim or full.head_dim,
            full_heads=None,
        )

    def for_layer(self, index: int) -> ModelConfig:
        """Configuration of layer `index`, whose number and sizes of heads may differ."""
        config = self.for_full_layers() if self.windows[index] is None else self
        if self.layer_heads is None:
            return config
        return replace(config, num_heads=self.layer_heads[index], layer_heads=None)

    def with_mtp(self, num_drafts: int) -> ModelConfig:
        """The configuration with the checkpoint's MTP heads. The indices of their decoder layers
        begin at `num_layers`, so per-layer lists get one more entry per head.

        Args:
            num_drafts: maximum number of drafts per step; heads beyond it are not loaded.

        Raises:
            ValueError: MTP heads of this family are not supported.
        """
        mtp, names, moe, mla = self.mtp, self.tensors, self.moe, self.mla
        if mtp is None:
            raise ValueError(
                f"--speculative-method mtp is not supported for {self.architecture}: use ngram, or "
                "draft with a smaller model"
            )
        mtp = replace(mtp, further=mtp.further[: num_drafts - 1])
        chain, extended = mtp.chain, (True,) * len(mtp.chain)
        if names is not None:
            loaded = [head.layer for head in chain]
            kept = [
                name for name in names.skipped if not any(one.startswith(name) for one in loaded)
            ]
            names = replace(
                names, skipped=(*kept, *(one for head in chain for one in head.skipped))
            )
        if moe is not None:
            dense = {index for index, head in enumerate(chain, self.num_layers) if head.is_dense}
            moe = replace(moe, dense_layers=moe.dense_layers | dense)
        if mla is not None and mla.indexer is not None:  # each head's layer has its own indexer
            layers = (*mla.indexer.layers, *extended)
            mla = replace(mla, indexer=replace(mla.indexer, layers=layers))
        heads = self.layer_heads
        if heads is not None:
            heads = (*heads, *(head.num_heads or self.num_heads for head in chain))
        return replace(
            self,
            windows=(*self.windows, *(head.window for head in chain)),
            rotating=None if self.rotating is None else (*self.rotating, *extended),
            layer_heads=heads,
            moe=moe,
            mla=mla,
            tensors=names,
            mtp=mtp,
            loads_mtp=True,
        )

    def resolve_max_model_len(self, requested: int | None) -> int:
        """The length limit of an engine in tokens: `requested`, or the checkpoint's limit if it is
        not set, rounded down to whole blocks.

        Raises:
            ValueError: `requested` exceeds the checkpoint's limit, or is less than a block.
        """
        if requested is None:
            return self.max_model_len
        if requested > self.max_model_len:
            raise ValueError(
                f"--max-model-len {requested} exceeds this checkpoint's maximum of "
                f"{self.max_model_len} ({self.max_model_len_reason}): lower it"
            )
        if requested < self.block_size:
            raise ValueError(
                f"--max-model-len {requested} is less than one block of this model, "
                f"{self.block_size} tokens: raise it"
            )
        return requested // self.block_size * self.block_size


def load_model_config(
    model: str,
    *,
    weights: bool = True,
    pooling: PoolingOptions = PoolingOptions(),  # noqa: B008  # frozen
) -> ModelConfig:
    """Reads the configuration of a checkpoint folder or a Hub repository.

    The weights of a repository are downloaded only if its configuration is supported.

    Args:
        model: folder or repository id.
        weights: whether the checkpoint's weights are also needed.
        pooling: task and pooling; by default those of the checkpoint.

    Raises:
        Unavailable: there is no such folder, or the Hub is unreachable.
        ValueError: the Hub denies access, or the configuration is not supported; the message then
            names the key.
    """
    folder = resolve_checkpoint(model, weights=False)
    config = ModelConfig.parse(read_json(folder / "config.json"), folder, pooling)
    if not weights:
        return config
    return replace(config, folder=resolve_checkpoint(model))


def _read_family(
    raw: RawConfig, pooler: PoolerConfig | None
) -> tuple[FamilyConfig, TensorNames | None]:
    """The schema filled from config.json, and the tensor names in the checkpoint that differ from
    the family's; None if none do."""
    if pooler is None:
        return read_family(raw)
    if pooler.info.is_bidirectional:
        encoder = ENCODERS[raw["architectures"][0]].read(raw)
        return encoder, pooler.encoder_tensors(encoder)
    family, _ = read_family(raw)
    return family, pooler.tensors(tied=family.tie_word_embeddings)


def _ropes(family: FamilyConfig) -> tuple[RopeConfig, RopeConfig | None]:
    """Rotary embeddings of the model and of its sliding-window layers; the second is None if all
    layers have the same."""
    raw, length = _keys(family), family.max_position_embeddings
    by_layer = bool(family.window_theta)
    if family.has_layer_shares and family.rope_parameters:
        raw["rope_parameters"] = without_shares(family.rope_parameters)
    rope = parse_rope(raw, length, query_beta=family.query_beta, by_layer=by_layer)
    pairs = family.rotary_size() // 2
    if rope.short_factors is not None and len(rope.short_factors) != pairs:
        key = "rope_scaling" if family.rope_scaling else "rope_parameters"
        raise ValueError(
            f"{key}.short_factor in config.json must have {pairs} numbers, one per pair of "
            f"rotary dimensions, got {len(rope.short_factors)}: fix it"
        )
    return rope, parse_window_rope(raw, length, family.window_theta) if by_layer else None


def _canvas(family: FamilyConfig, folder: Path) -> CanvasConfig | None:
    """Configuration of canvases, from generation_config.json; None for families without any."""
    length, path = family.canvas(), folder / "generation_config.json"
    if length is None:
        return None
    return CanvasConfig.of(length, read_json(path) if path.is_file() else {})


def _experts(family: FamilyConfig) -> MoeConfig | None:
    """Configuration of the experts; None for a dense model. Raises ValueError if `mlp_layer_types`,
    which transformers 5 writes, disagrees with the other keys."""
    moe, kinds, count = family.moe(), family.mlp_layer_types, family.num_hidden_layers
    dense = frozenset(range(count)) if moe is None else moe.dense_layers
    expected = ["dense" if layer in dense else "sparse" for layer in range(count)]
    if kinds is not None and kinds != expected:
        raise ValueError(
            f"mlp_layer_types = {short(kinds)} in config.json is not supported: it must have dense "
            f"for {expected.count('dense')} and sparse for {expected.count('sparse')} layers, to "
            "match the other keys"
        )
    return None if moe is None else checked(moe, family.top_k_key)


def _divided(family: FamilyConfig, mamba: MambaConfig | None) -> dict[str, int]:
    """Sizes that must be divided evenly among the ranks, by description."""
    heads = {} if mamba is None else {"the number of Mamba heads": mamba.num_heads}
    return {**family.divided(), **heads}


def _keys(family: FamilyConfig) -> dict[str, Any]:
    """Keys and values of a filled schema, without keys whose value is None."""
    keys = msgspec.structs.asdict(family).items()
    return {key: value for key, value in keys if value is not None}


def _length_limit(
    family: FamilyConfig,
    rope: RopeConfig,
    windows: tuple[int | None, ...],
    canvas: CanvasConfig | None,
    pooler: PoolerConfig | None,
) -> tuple[int, str]:
    """Maximum sequence length, in tokens (see `ModelConfig.max_model_len`), and the keys from which
    it is derived.

    Full attention is equal to windowed attention for sequences no longer than the window, and to
    dual-chunk attention for sequences no longer than the context of one chunk.

    Args:
        family: config.json.
        rope: the rotary embedding (of full-attention layers, if others have a different one); its
            `max_position_embeddings` counts positions after scaling.
        windows: windows per layer, if windows are not implemented for this family; otherwise empty.
        canvas: the canvas, whose positions follow the sequence; None if there is none.
        pooler: how hidden states become a vector; None for a model that generates text.
    """
    limit = family.max_position_embeddings
    reason = f"max_position_embeddings {limit}, rope kind {rope.kind}"
    limit = limit if family.window_theta else rope.scaled_length(limit)
    spans = {f"sliding_window {window}": window for window in windows if window is not None}
    for name, span in {**spans, **family.spans()}.items():
        if span < limit:
            logger.warning(
                "lowering the maximum model length from %d to %d: %s is not implemented, but "
                "equals full attention up to that length",
                limit,
                span,
                name,
            )
            limit, reason = span, f"{name}, which equals full attention up to that length"
    length = None if pooler is None else pooler.max_seq_length
    if length is not None and length < limit:
        return length, f"max_seq_length {length} of sentence-transformers"
    if canvas is not None:
        return limit - canvas.length, f"{reason}, minus a canvas of {canvas.length}"
    return limit, reason


def _eos_token_ids(raw: RawConfig, family: FamilyConfig, folder: Path) -> tuple[int, ...]:
    """EOS tokens from config.json, its text_config and generation_config.json combined, as in vLLM;
    the family's default if no file has the key, since null overrides it in transformers."""
    path = folder / "generation_config.json"
    text = raw.get("text_config")
    sources = [
        raw,
        text if isinstance(text, dict) else {},
        read_json(path) if path.is_file() else {},
    ]
    if any("eos_token_id" in source for source in sources):
        return tuple(dict.fromkeys(chain.from_iterable(map(eos_token_ids, sources))))
    return eos_token_ids(_keys(family))


def _quantization(family: FamilyConfig, folder: Path) -> QuantizationConfig | None:
    """The checkpoint's quantization, without modules that the family never quantizes."""
    found = read_quantization(_keys(family), folder, mxfp4=family.mxfp4_experts)
    if found is None or not family.unquantized:
        return found
    return replace(found, left_out=(*found.left_out, *family.unquantized))


def _with_skipped_tensors(
    names: TensorNames | None,
    family: FamilyConfig,
    quantization: QuantizationConfig | None,
) -> TensorNames | None:
    """Adds to `names` the tensors that are skipped or renamed in this family, including those of
    multi-token prediction layers, and in this quantization format."""
    skipped = family.skipped_tensors()
    if skipped:
        names = names or TensorNames()
        names = replace(names, skipped=(*names.skipped, *skipped))
    if family.renamed_ends or family.skipped_ends:
        names = replace(
            names or TensorNames(),
            renamed_ends=family.renamed_ends,
            skipped_ends=family.skipped_ends,
        )
    if quantization is not None and (quantization.skipped_ends or quantization.renamed_ends):
        names = names or TensorNames()
        names = replace(
            names,
            renamed_ends=(*names.renamed_ends, *quantization.renamed_ends),
            skipped_ends=(*names.skipped_ends, *quantization.skipped_ends),
        )
    return names
