"""The model configuration: what `config.json` of a checkpoint says about its mathematics. No
torch."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from worker.models.checkpoint import (
    positive_integer,
    read_json,
    refuse_files,
    resolve_checkpoint,
)
from worker.models.families import find_family
from worker.models.family import HeadSizes, ModelFamily, RawConfig
from worker.models.mla_config import MlaConfig, parse_mla
from worker.models.moe_config import MoeConfig
from worker.models.quantization import QuantizationConfig
from worker.models.quantization_formats import read_quantization
from worker.models.rope_config import RopeConfig, parse_rope, parse_window_rope
from worker.models.wrappers import TensorNames, read_text_part, with_skipped_tensors

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
"""Kinds of JSON values, and the keys that have them: "false" in quotes would count as true. Keys
that stand nowhere here are checked by their family's default, where that is a bool or a float."""
_KINDS_OF_DEFAULTS: Mapping[type, str] = {bool: "true or false", float: "a number"}
"""Kinds of values that defaults ask for, whole numbers aside: ids of tokens may be lists, a pattern
of layers may be letters."""

_MOST_LAYERS = 10_000
"""Eighty times as deep as any released model. What is said of each layer is then at most some
megabytes, and not what a number in a file of a few bytes asks for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """One checkpoint: sizes, rotary embedding, biases, limits, end tokens."""

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
    """Leading dimensions of a head that rotate."""
    full_heads: HeadSizes | None = None
    """Heads of layers that see all positions, where they are not those of the others."""
    rms_norm_eps: float
    rope: RopeConfig
    window_rope: RopeConfig | None = None
    """Rotation of layers with a window, where these have one of their own."""
    qkv_bias: bool
    """Whether the q, k and v projections have biases."""
    output_bias: bool
    """Whether the attention's output projection has one."""
    mlp_bias: bool
    """Whether the projections of the MLP have biases."""
    qk_norm: bool
    """Whether each head of q and k is normalised before it rotates."""
    windows: tuple[int | None, ...]
    """Windows per layer: how many tokens one sees, itself included; None for all before it."""
    has_chunks: bool | None = None
    """Whether windows begin at multiples of their length; None where they do not."""
    rotating: tuple[bool, ...] | None = None
    """Whether queries and keys rotate, per layer; None where they do in all, or where the family's
    class tells by the windows."""
    linear_layers: frozenset[int] | None = None
    """Layers that keep a state of each request in place of keys and values; None where none do."""
    attention_cap: float = 0.0
    """Scores of queries and keys are capped so by tanh; 0 where they are not."""
    has_sinks: bool = False
    """Whether heads have attention sinks."""
    tie_word_embeddings: bool
    max_model_len: int
    """Length of the longest sequence that is computed exactly."""
    max_model_len_reason: str
    """Which keys of config.json that limit comes from."""
    eos_token_ids: tuple[int, ...]
    dtype: str | None = None
    """The type that it is stored in, where config.json says so."""
    block_size: int = 1
    """Tokens that are decided together, and see each other: 1 for an autoregressive model."""
    mask_token_id: int | None = None
    """Stands for what is undecided; None for an autoregressive model."""
    moe: MoeConfig | None = None
    """None for a dense model."""
    mla: MlaConfig | None = None
    """None where heads have keys and values of their own."""
    quantization: QuantizationConfig | None = None
    """The format of linear weights; None where they are not quantized."""
    own: Mapping[str, Any] | None = None
    """Values of the keys that the family's class alone reads (`ModelFamily.own`)."""
    tensors: TensorNames | None = None
    """How a checkpoint's tensors are called otherwise; None where names are the family's own."""

    @classmethod
    def parse(cls, raw: RawConfig, folder: Path) -> ModelConfig:
        """Reads the content of config.json; end tokens come from the folder's files, which may lack
        weights."""
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
            eos_token_ids=_eos_token_ids(merged, folder),
            dtype=_stored_dtype(raw),
            block_size=block_size,
            mask_token_id=mask_token_id,
            quantization=quantization,
            own={key: merged[key] for key in family.own} or None,
            tensors=with_skipped_tensors(tensors, family, num_layers, quantization),
        )

    def windows_within(self, max_model_len: int) -> tuple[int, ...]:
        """Windows per layer: how many positions a query sees, its own included; 0 for all before
        it, which is the same in sequences of at most the window."""
        return tuple(
            window if window is not None and window < max_model_len else 0
            for window in self.windows
        )

    @property
    def head_dims(self) -> tuple[int, ...]:
        """Dimensions of heads, ascending: more than one number where layers differ."""
        return tuple(sorted({self.head_dim, self.for_full_layers().head_dim}))

    def for_full_layers(self) -> ModelConfig:
        """The same of layers that see all positions: what differs is the size of their heads."""
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
        """The same of one layer, from 0."""
        return self.for_full_layers() if self.windows[index] is None else self

    def resolve_max_model_len(self, requested: int | None) -> int:
        """The length limit of an engine: what was asked for, or the checkpoint's own; whole blocks.

        Raises:
            ValueError: more was asked for than the checkpoint can do.
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
    """Reads a checkpoint folder or a Hub repository.

    A repository's weights are downloaded when its configuration was found to be supported.

    Args:
        model: the folder or the repository's name.
        weights: whether the checkpoint's weights are needed too.

    Raises:
        ValueError: there is no such checkpoint, or its mathematics is not supported; the message
            names the key.
    """
    folder = resolve_checkpoint(model, weights=False)
    config = ModelConfig.parse(read_json(folder / "config.json"), folder)
    if not weights:
        return config
    return replace(config, folder=resolve_checkpoint(model))


def _stored_dtype(raw: RawConfig) -> str | None:
    """Type of the weights, under the name of transformers 5 or that of before."""
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
    """One value where Hunyuan says the same of each layer."""
    said = dict(raw)
    for key in ("moe_topk", "num_shared_expert", "moe_intermediate_size"):
        value = raw.get(key)
        if type(value) is list and value and value == value[:1] * len(value):
            said[key] = value[0]
    return said


def _is_one(value: object, types: tuple[type, ...]) -> bool:
    """Whether a value is of one of these types; numbers are finite and not negative."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return type(value) in types
    return isinstance(value, types) and 0 <= value < math.inf


def _with_defaults(raw: RawConfig, family: ModelFamily) -> RawConfig:
    """The keys of config.json, with what its architecture means by those that are missing."""
    defaults = family.defaults
    merged = {**defaults, **{key: value for key, value in raw.items() if value is not None}}
    # null switches a window or a cap off and lets head counts and sizes follow from others.
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
    """Dimensions of a head; where keys are computed from latents, those that may rotate, or all
    where config.json says which share of all these are."""
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
    """The epsilon of norms, by whichever name the family has it."""
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
    """The rotary embedding, and that of layers with a window where it is another."""
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
    """Leading dimensions of a head that rotate."""
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
    """Block size and mask token, 1 and None for an autoregressive family."""
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
    """The longest sequence that is computed exactly, and the keys that say so.

    Full attention equals windowed attention for sequences no longer than the window, and
    dual-chunk attention for those no longer than what one chunk sees.

    Args:
        raw: config.json.
        rope: its rotary embedding.
        windows: per layer, where windows are not implemented.
        is_only: whether all layers rotate so; else the length is said with the scaling.
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


def _eos_token_ids(raw: RawConfig, folder: Path) -> tuple[int, ...]:
    """End tokens of generation_config.json, else of config.json."""
    path = folder / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}
    value = generation.get("eos_token_id")
    if value is None:
        value = raw.get("eos_token_id")
    if value is None:
        return ()
    tokens = value if isinstance(value, list) else [value]
    if not all(type(token) is int for token in tokens):
        raise ValueError(f"eos_token_id must be token ids, got {value!r:.80}: repair it")
    return tuple(tokens)
