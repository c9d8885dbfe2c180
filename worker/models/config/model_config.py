"""Model configuration: what config.json of a checkpoint says about its mathematics. Imports no
torch."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from worker.models.config.checkpoint import (
    positive_integer,
    read_json,
    refuse_files,
    resolve_checkpoint,
)
from worker.models.config.families import find_family
from worker.models.config.family import HeadSizes, ModelFamily, RawConfig
from worker.models.config.mla_config import MlaConfig, parse_mla
from worker.models.config.moe_config import MoeConfig
from worker.models.config.quantization import QuantizationConfig
from worker.models.config.quantization_formats import read_quantization
from worker.models.config.rope_config import RopeConfig, parse_rope, parse_window_rope
from worker.models.config.wrappers import TensorNames, read_text_part, with_skipped_tensors
from worker.protocol.text.end_tokens import eos_token_ids

logger = logging.getLogger(__name__)

_KINDS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "a whole number": (
        (int,),
        """
        vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
        num_key_value_heads head_dim max_position_embeddings original_max_position_embeddings
        rotary_dim sliding_window max_window_layers block_size mask_token_id num_experts
        num_local_experts num_experts_per_tok moe_intermediate_size decoder_sparse_step
        moe_k moe_num_experts moe_num_shared_experts moe_layer_start_index moe_layer_interval
        moe_topk num_shared_expert num_layers ffn_hidden_size expert_ffn_hidden_size zero_expert_num
        shared_expert_intermediate_size experts_per_token initial_context_length
        global_head_dim num_global_key_value_heads top_k_experts attention_chunk_size floor_scale
        interleave_moe_layer_step intermediate_size_mlp
        n_routed_experts n_shared_experts no_rope_layer_interval
        first_k_dense_replace n_group topk_group num_shared_experts full_attention_interval
        linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads
        linear_num_value_heads
        kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim qk_head_dim v_head_dim
        dim_model_base ffn_hidden_size kv_channels seq_length num_kv_heads
        """,
    ),
    "a number": (
        (int, float),
        """
        rms_norm_eps layer_norm_eps rope_theta partial_rotary_factor routed_scaling_factor
        logit_scale query_pre_attn_scalar rope_local_base_freq attn_logit_softcapping
        final_logit_softcapping swiglu_alpha swiglu_limit attn_scale
        norm_eps norm_epsilon layer_norm_epsilon rotary_emb_base scale_emb scale_depth
        """,
    ),
    "true or false": (
        (bool,),
        """
        tie_word_embeddings attention_bias mlp_bias use_sliding_window norm_topk_prob
        moe_router_enable_expert_bias attention_out_bias use_qk_norm bias qkv_bias
        rope_interleave attention_k_eq_v enable_moe_block attn_temperature_tuning
        no_bias use_bias use_qkv_bias
        """,
    ),
    "a list": (
        (list,),
        """
        architectures layer_types mlp_only_layers no_rope_layers attn_type_list mlp_layer_types
        moe_layers
        """,
    ),
    "an object": (
        (dict,),
        """
        rope_scaling rope_parameters quantization_config compression_config
        dual_chunk_attention_config per_layer_config
        """,
    ),
}
"""Kinds of JSON values, and the keys that must have them: a quoted "false" would count as true.
Other keys are checked against their family's default, if that is a bool or a float."""
_KINDS_OF_DEFAULTS: Mapping[type, str] = {bool: "true or false", float: "a number"}
"""Kinds of values by type of the family's default. Not for whole numbers: token ids may also be
lists, and patterns of layers strings."""

_MOST_LAYERS = 10_000
"""Eighty times as many layers as any released model has. It bounds the memory for lists per layer,
whatever number a small config.json names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Configuration of one checkpoint: sizes, rotary embedding, biases, limits, end tokens."""

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
    """Number of leading dimensions of a head with rotary embedding."""
    full_heads: HeadSizes | None = None
    """Heads of full-attention layers, where they differ from those of other layers."""
    rms_norm_eps: float
    rope: RopeConfig
    window_rope: RopeConfig | None = None
    """Rotary embedding of sliding-window layers, where it differs from `rope`."""
    qkv_bias: bool
    """Whether the q, k and v projections have biases."""
    output_bias: bool
    """Whether the attention's output projection has a bias."""
    mlp_bias: bool
    """Whether the projections of the MLP have biases."""
    qk_norm: bool
    """Whether each head of q and k is normalised (QK norm)."""
    windows: tuple[int | None, ...]
    """Sliding window per layer: number of tokens that one attends to, itself included; None for
    full attention."""
    has_chunks: bool | None = None
    """Whether attention is chunked: windows begin at multiples of their length. None if not."""
    rotating: tuple[bool, ...] | None = None
    """Whether queries and keys have rotary embedding, per layer; None if they do in all, or if the
    family's class decides by the windows."""
    linear_layers: frozenset[int] | None = None
    """Linear-attention layers, which keep a state per request instead of keys and values; None
    without any."""
    attention_cap: float = 0.0
    """Soft cap of attention scores (by tanh); 0 for none."""
    has_sinks: bool = False
    """Whether heads have attention sinks."""
    tie_word_embeddings: bool
    max_model_len: int
    """Length of the longest sequence that is computed exactly."""
    max_model_len_reason: str
    """Keys of config.json that `max_model_len` follows from, for messages."""
    eos_token_ids: tuple[int, ...]
    dtype: str | None = None
    """Data type of the stored weights, if config.json names it."""
    block_size: int = 1
    """Block size of a block-diffusion model; 1 for an autoregressive model."""
    mask_token_id: int | None = None
    """Token at undecided positions; None for an autoregressive model."""
    moe: MoeConfig | None = None
    """Mixture of experts; None for a dense model."""
    mla: MlaConfig | None = None
    """Multi-head latent attention; None for other attention."""
    quantization: QuantizationConfig | None = None
    """Quantization format of linear weights; None if they are not quantized."""
    own: Mapping[str, Any] | None = None
    """Values of the keys that only the family's class reads (`ModelFamily.own`)."""
    tensors: TensorNames | None = None
    """Other names of tensors in this checkpoint; None where they are the family's."""

    @classmethod
    def parse(cls, raw: RawConfig, folder: Path) -> ModelConfig:
        """Reads the content of config.json, and end tokens from the folder's other files; raises
        ValueError, which names the key, for a value that is malformed or not supported."""
        given = raw
        raw, tensors = read_text_part(_unlisted(raw))
        _check_kinds(raw)
        architecture, family = find_family(raw)
        _check_kinds_of_defaults(raw, family)
        family.refuse_unknown(raw)
        refuse_files(folder)
        merged = _with_defaults(raw, family)
        num_heads = positive_integer(merged, "num_attention_heads")
        hidden_size = positive_integer(merged, "hidden_size")
        num_layers = _num_layers(merged)
        head_dim = _head_dim(merged, family, hidden_size // num_heads)
        rope, window_rope = _ropes(merged, family, head_dim)
        quantization = read_quantization(raw, folder, mxfp4=family.mxfp4_experts)
        mla = _latents(merged, family, rope)
        windows = family.windows(merged)
        block_size, mask_token_id = _block_diffusion(merged, family)
        capped = windows if block_size > 1 else ()
        limit, reason = _length_limit(merged, rope, capped, is_only=window_rope is None)
        return cls(
            architecture=architecture,
            folder=folder,
            vocab_size=positive_integer(merged, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=positive_integer(merged, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=int(merged.get("num_key_value_heads") or num_heads),
            head_dim=head_dim if mla is None else mla.query_dim,
            rotary_dim=_rotary_dim(merged, head_dim),
            mla=mla,
            moe=None if family.parse_moe is None else family.parse_moe(merged),
            rms_norm_eps=_norm_eps(merged),
            rope=rope,
            window_rope=window_rope,
            qkv_bias=family.qkv_bias or bool(merged.get(family.qkv_bias_key, False)),
            output_bias=bool(merged.get(family.output_bias, False)),
            mlp_bias=bool(merged.get(family.mlp_bias_key, False)),
            qk_norm=bool(merged.get(family.qk_norm_key, family.qk_norm)),
            windows=windows,
            has_chunks=family.has_chunks or None,
            rotating=family.rotating and family.rotating(merged),
            full_heads=family.full_heads and family.full_heads(merged),
            linear_layers=family.linear_layers and family.linear_layers(merged),
            attention_cap=float(merged.get("attn_logit_softcapping") or 0.0),
            has_sinks=family.has_sinks,
            tie_word_embeddings=bool(merged.get("tie_word_embeddings", False)),
            max_model_len=limit // block_size * block_size,
            max_model_len_reason=reason,
            eos_token_ids=_eos_token_ids(given, merged, folder),
            dtype=_stored_dtype(raw),
            block_size=block_size,
            mask_token_id=mask_token_id,
            quantization=quantization,
            own={key: merged[key] for key in family.own} or None,
            tensors=with_skipped_tensors(tensors, family, num_layers, quantization),
        )

    def windows_within(self, max_model_len: int) -> tuple[int, ...]:
        """Sliding windows per layer in sequences of at most `max_model_len` tokens: number of
        positions that a query attends to, its own included; 0 for full attention, which a window
        of at least `max_model_len` equals."""
        return tuple(
            window if window is not None and window < max_model_len else 0
            for window in self.windows
        )

    @property
    def head_dims(self) -> tuple[int, ...]:
        """Head dimensions of all layers, ascending, without repeats."""
        return tuple(sorted({self.head_dim, self.for_full_layers().head_dim}))

    def for_full_layers(self) -> ModelConfig:
        """Configuration of full-attention layers, whose heads may have other sizes."""
        full = self.full_heads
        if full is None:
            return self
        return replace(
            self,
            head_dim=full.head_dim,
            num_kv_heads=full.num_kv_heads,
            rotary_dim=full.head_dim,
            full_heads=None,
        )

    def for_layer(self, index: int) -> ModelConfig:
        """Configuration of layer `index`, whose heads may have sizes of their own."""
        return self.for_full_layers() if self.windows[index] is None else self

    def resolve_max_model_len(self, requested: int | None) -> int:
        """The length limit of an engine in tokens: `requested`, or else the checkpoint's limit,
        rounded down to whole blocks.

        Raises:
            ValueError: `requested` exceeds the checkpoint's limit, or is less than a block.
        """
        if requested is None:
            return self.max_model_len
        if requested > self.max_model_len:
            raise ValueError(
                f"--max-model-len {requested} is more than this checkpoint's "
                f"{self.max_model_len} ({self.max_model_len_reason}): lower it"
            )
        if requested < self.block_size:
            raise ValueError(
                f"--max-model-len {requested} is less than one block of this model, "
                f"{self.block_size} tokens: raise it"
            )
        return requested // self.block_size * self.block_size


def load_model_config(model: str, *, weights: bool = True) -> ModelConfig:
    """Reads the configuration of a checkpoint folder or a Hub repository.

    Weights of a repository are downloaded after its configuration was found to be supported.

    Args:
        model: the folder or the repository's name.
        weights: whether the checkpoint's weights are needed too.

    Raises:
        Unavailable: there is no such folder, or the Hub is unreachable.
        ValueError: the Hub refuses access, or the mathematics is not supported; the message names
            the key.
    """
    folder = resolve_checkpoint(model, weights=False)
    config = ModelConfig.parse(read_json(folder / "config.json"), folder)
    if not weights:
        return config
    return replace(config, folder=resolve_checkpoint(model))


def _stored_dtype(raw: RawConfig) -> str | None:
    """Data type of the weights, by the key of transformers 5 or the older one."""
    value = raw.get("dtype") or raw.get("torch_dtype")
    return value.removeprefix("torch.") if isinstance(value, str) else None


def _check_kinds(raw: RawConfig) -> None:
    for kind, (_, keys) in _KINDS.items():
        _check_kind(raw, keys.split(), kind)


def _check_kinds_of_defaults(raw: RawConfig, family: ModelFamily) -> None:
    for key, default in family.defaults.items():
        if type(default) in _KINDS_OF_DEFAULTS:
            _check_kind(raw, [key], _KINDS_OF_DEFAULTS[type(default)])


def _check_kind(raw: RawConfig, keys: Iterable[str], kind: str) -> None:
    types, _ = _KINDS[kind]
    for key in keys:
        value = raw.get(key)
        if value is not None and not _is_one(value, types):
            raise ValueError(f"{key} in config.json must be {kind}, got {value!r:.80}: repair it")


def _unlisted(raw: RawConfig) -> RawConfig:
    """config.json with one value in place of lists in which Hunyuan repeats it for each layer."""
    said = dict(raw)
    for key in ("moe_topk", "num_shared_expert", "moe_intermediate_size"):
        value = raw.get(key)
        if type(value) is list and value and value == value[:1] * len(value):
            said[key] = value[0]
    return said


def _is_one(value: object, types: tuple[type, ...]) -> bool:
    """Whether a value is of one of these types; numbers must be finite and not negative."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return type(value) in types
    return isinstance(value, types) and 0 <= value < math.inf


def _with_defaults(raw: RawConfig, family: ModelFamily) -> RawConfig:
    """config.json with its family's defaults for missing keys, in the reader's terms."""
    defaults = family.defaults
    merged = {**defaults, **{key: value for key, value in raw.items() if value is not None}}
    # Of these keys null is a value: no window, no cap, or a size that follows from other keys.
    for key in (
        *("sliding_window", "attention_chunk_size"),
        *("head_dim", "num_key_value_heads", "q_lora_rank"),
        *("attn_logit_softcapping", "final_logit_softcapping", "num_global_key_value_heads"),
    ):
        if key in raw and raw[key] is None:
            merged[key] = None
    if "num_local_experts" in merged and "num_experts" in defaults:
        merged["num_experts"] = merged["num_local_experts"]  # as transformers 5 writes it
    share = "partial_rotary_factor"
    table = raw.get("rope_parameters") or {}
    if share not in raw and share in table and share in family.keys | frozenset(defaults):
        merged[share] = table[share]  # as transformers 5 writes it
        _check_kinds(merged)
    return merged if family.translate is None else family.translate(merged)


def _head_dim(raw: RawConfig, family: ModelFamily, default: int) -> int:
    """Dimensions of a head. With latent attention: those with rotary embedding, or all if
    config.json says which share of them has it."""
    if not family.has_latents:
        return int(raw.get("head_dim") or default)
    rotating, share = positive_integer(raw, "qk_rope_head_dim"), raw.get("partial_rotary_factor")
    if share in (None, 1):
        return rotating
    plain = positive_integer(raw, "qk_nope_head_dim")
    if int((plain + rotating) * float(share)) != rotating:
        raise ValueError(
            f"partial_rotary_factor {share} in config.json does not go with qk_nope_head_dim "
            f"{plain} and qk_rope_head_dim {rotating}: repair it"
        )
    return plain + rotating


def _latents(raw: RawConfig, family: ModelFamily, rope: RopeConfig) -> MlaConfig | None:
    if not family.has_latents:
        return None
    return parse_mla(raw, rope, whole_heads="partial_rotary_factor" in family.keys)


def _norm_eps(raw: RawConfig) -> float:
    """The epsilon of norms, by either of its keys."""
    key = "layer_norm_eps" if "layer_norm_eps" in raw else "rms_norm_eps"
    return float(raw.get(key, 1e-6))


def _num_layers(raw: RawConfig) -> int:
    count = positive_integer(raw, "num_hidden_layers")
    if count > _MOST_LAYERS:
        raise ValueError(
            f"num_hidden_layers in config.json must be at most {_MOST_LAYERS}, got "
            f"{count!r:.20}: repair it"
        )
    return count


def _ropes(
    raw: RawConfig, family: ModelFamily, head_dim: int
) -> tuple[RopeConfig, RopeConfig | None]:
    """The rotary embedding, and that of sliding-window layers if it differs, else None."""
    max_position_embeddings = positive_integer(raw, "max_position_embeddings")
    by_layer = bool(family.window_theta)
    rope = parse_rope(raw, max_position_embeddings, query_beta=family.query_beta, by_layer=by_layer)
    pairs = _rotary_dim(raw, head_dim) // 2
    if rope.short_factors is not None and len(rope.short_factors) != pairs:
        key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
        raise ValueError(
            f"{key}.short_factor in config.json must be {pairs} numbers, one for every two "
            f"dimensions that rotate, got {len(rope.short_factors)}: repair it"
        )
    if not by_layer:
        return rope, None
    return rope, parse_window_rope(raw, max_position_embeddings, family.window_theta)


def _rotary_dim(raw: RawConfig, head_dim: int) -> int:
    """Number of leading dimensions of a head with rotary embedding."""
    share, said = raw.get("partial_rotary_factor"), raw.get("rotary_dim")
    rotary_dim = int(head_dim * float(1.0 if share is None else share))
    if share is None and said is not None:
        rotary_dim = int(said)
    if said not in (None, rotary_dim) or not 0 < rotary_dim <= head_dim:
        raise ValueError(
            f"partial_rotary_factor {share} and rotary_dim {said} in config.json do not go with "
            f"head_dim {head_dim}: repair it"
        )
    return rotary_dim


def _block_diffusion(raw: RawConfig, family: ModelFamily) -> tuple[int, int | None]:
    """Block size and mask token; (1, None) for an autoregressive family."""
    if "block_size" not in family.defaults:
        return 1, None
    size, mask_token_id = positive_integer(raw, "block_size"), int(raw["mask_token_id"])
    if size < 2 or size & (size - 1):
        raise ValueError(
            f"block_size in config.json must be a power of two from 2 on, got {size}: "
            "use another checkpoint"
        )
    if not 0 <= mask_token_id < positive_integer(raw, "vocab_size"):
        raise ValueError(f"mask_token_id {mask_token_id} in config.json is not in the vocabulary")
    return size, mask_token_id


def _length_limit(
    raw: RawConfig,
    rope: RopeConfig,
    windows: tuple[int | None, ...],
    *,
    is_only: bool,
) -> tuple[int, str]:
    """Length of the longest sequence that is computed exactly, and the keys that it follows from.

    Full attention equals windowed attention for sequences no longer than the window, and
    dual-chunk attention for those no longer than what one chunk sees.

    Args:
        raw: config.json with the family's defaults.
        rope: its rotary embedding.
        windows: windows per layer, if they are not implemented for this family; else empty.
        is_only: whether all layers share this rotary embedding; if not,
            `max_position_embeddings` counts positions after the scaling.
    """
    limit = positive_integer(raw, "max_position_embeddings")
    limit = rope.scaled_length(limit) if is_only else limit
    reason = f"max_position_embeddings {raw['max_position_embeddings']}, rope kind {rope.kind}"
    chunks = raw.get("dual_chunk_attention_config") or {}
    spans = {f"sliding_window {window}": window for window in windows if window is not None}
    if chunks:
        within = "dual_chunk_attention_config."
        span = positive_integer(chunks, "chunk_size", within) - positive_integer(
            chunks, "local_size", within
        )
        spans[f"dual_chunk_attention_config of {span} tokens"] = span
    for name, span in spans.items():
        if span < limit:
            logger.warning(
                "the checkpoint attends by %s, which is not implemented: the maximum model length "
                "is lowered from %d to %d, where that is the same as full attention",
                name,
                limit,
                span,
            )
            limit, reason = span, f"{name}, beyond which full attention is something else"
    return limit, reason


def _eos_token_ids(given: RawConfig, merged: RawConfig, folder: Path) -> tuple[int, ...]:
    """End tokens that config.json and generation_config.json name, as in vLLM those of both; else
    the family's default.

    Args:
        given: the content of config.json.
        merged: that of its text part, with the family's defaults.
        folder: folder of the checkpoint.
    """
    path = folder / "generation_config.json"
    text = given.get("text_config")
    sources = [
        given,
        text if isinstance(text, dict) else {},
        read_json(path) if path.is_file() else {},
    ]
    named = chain.from_iterable(map(eos_token_ids, sources))
    return tuple(dict.fromkeys(named)) or eos_token_ids(merged)
