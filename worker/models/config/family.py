"""Base of model families' schemas: keys that all families have, and their meaning. Does not import
torch.

A vendor's module in `worker.models.config.vendors` has one `FamilyConfig` per family. Its fields
are keys of config.json (see `schema.py`), its class attributes are properties that no key
specifies, and its methods translate the keys to `ModelConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple, Self

import msgspec
from msgspec import Meta

from worker.models.config.block_config import BlockSparseConfig
from worker.models.config.mamba_config import MambaConfig
from worker.models.config.mla_config import MlaConfig
from worker.models.config.moe_config import MoeConfig
from worker.models.config.mtp_config import MtpConfig
from worker.models.config.rope_config import RopeConfig
from worker.models.config.schema import (
    Count,
    Index,
    No,
    Number,
    One,
    RawConfig,
    Yes,
    accepts,
    only,
    read_fields,
    short,
)

Layers = Annotated[int, Meta(ge=1, le=10_000)]
"""Number of layers. The limit, eighty times the number of layers of any released model, bounds the
memory of per-layer lists even if config.json specifies a huge number."""
FULL, SLIDING, CHUNKED, LINEAR = (
    *("full_attention", "sliding_attention"),
    *("chunked_attention", "linear_attention"),
)
"""Types of layers in `layer_types`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadSizes:
    """Sizes of the attention heads of some layers, if they differ from those of other layers."""

    head_dim: int
    num_kv_heads: int
    rotary_dim: int | None = None
    """Number of leading dimensions with rotary embedding; None for all."""


class Biases(NamedTuple):
    """Projections that have biases."""

    qkv: bool = False
    output: bool = False
    """The output projection of attention."""
    mlp: bool = False


class FamilyConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """config.json of a family with Llama's layers; the base of all families' schemas.

    Fields that a family supports with other values are redeclared in its schema.
    """

    architecture: ClassVar[str]
    """Value of `architectures` in config.json."""
    other_architectures: ClassVar[tuple[str, ...]] = ()
    """Other values of `architectures` used by checkpoints with the same layers and tensor names."""
    model_types: ClassVar[tuple[str, ...]]
    """Values of `model_type` of this family; a checkpoint may also omit it."""
    implementation: ClassVar[str]
    """Module in `worker.models.architectures` and class, as in "llama:LlamaForCausalLM"; a name, so
    that reading the configuration does not import torch."""
    harmless: ClassVar[frozenset[str]] = frozenset()
    """Keys that have no effect in this family, besides `schema.HARMLESS`."""
    aliases: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Pairs of an alternative key name, written by some versions of transformers, and the field."""
    extra_keys: ClassVar[tuple[str, ...]] = ()
    """Fields that only the family's class reads, from `ModelConfig.extra`."""
    layer_kinds: ClassVar[tuple[str, ...]] = (FULL,)
    """Layer types that `layer_types` may list. If config.json has no `layer_types`, all layers are
    of the last of these types, unless `layer_kind` is overridden."""
    kind_aliases: ClassVar[Mapping[str, str]] = {}
    """Alternative names of layer types in `layer_types`."""
    has_chunks: ClassVar[bool] = False
    """Whether attention is chunked: windows begin at multiples of their length, and a token attends
    to the tokens of its chunk up to itself."""
    window_theta: ClassVar[str] = ""
    """Field with the base of the rotary embedding of sliding-window layers, unless
    `rope_parameters` has it; empty if all layers have the same rotary embedding."""
    has_layer_shares: ClassVar[bool] = False
    """Whether `rope_parameters` has a `partial_rotary_factor` per layer type, which the family
    reads (`rotary_share`)."""
    query_beta: ClassVar[bool] = False
    """Whether rope parameters may have `llama_4_scaling_beta`, which scales queries by position."""
    has_sinks: ClassVar[bool] = False
    """Whether heads have attention sinks."""
    mxfp4_experts: ClassVar[bool] = False
    """Whether a checkpoint may have experts in MXFP4."""
    top_k_key: ClassVar[str] = "num_experts_per_tok"
    """Key of the number of experts per token, for messages."""
    skips_next_layers: ClassVar[bool] = False
    """Whether a checkpoint may have multi-token prediction layers, which are skipped."""
    skipped: ClassVar[tuple[str, ...]] = ()
    """Name prefixes of tensors that a checkpoint may have and that are not loaded."""
    skipped_ends: ClassVar[tuple[str, ...]] = ()
    """Name suffixes of tensors that a checkpoint may have and that are not loaded."""
    renamed_ends: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Pairs of an alternative tensor-name suffix, used in some checkpoints, and the family's
    suffix."""
    unquantized: ClassVar[tuple[str, ...]] = ()
    """Modules that quantized checkpoints neither quantize nor list as excluded."""

    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Layers
    num_attention_heads: Count
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    max_position_embeddings: Count
    rms_norm_eps: Number = 1e-6
    tie_word_embeddings: bool = False
    eos_token_id: Any = None
    dtype: Any = None
    torch_dtype: Any = None
    rope_theta: Number = 10000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    original_max_position_embeddings: Index | None = None
    partial_rotary_factor: Annotated[float | None, only(1)] = None
    layer_types: list[str] | None = None
    mlp_layer_types: list[str] | None = None
    quantization_config: dict[str, Any] | None = None
    compression_config: dict[str, Any] | None = None
    attention_bias: No = False
    mlp_bias: No = False
    use_qk_norm: No = False
    """Whether each head of q and k is normalized (QK norm)."""
    hidden_act: Annotated[str, only("silu", "swish")] = "silu"
    activation: Annotated[str, only("swiglu")] = "swiglu"
    is_causal: Yes = True
    logit_scale: One = 1.0
    logits_scaling: One = 1.0
    embedding_multiplier: One = 1.0
    residual_multiplier: One = 1.0
    num_experts: Annotated[int | None, only(0, 1)] = None
    num_local_experts: Annotated[int | None, only(0, 1)] = None

    @classmethod
    def read(cls, raw: RawConfig) -> Self:
        """Reads the content of config.json.

        Raises:
            ValueError: a key is unknown or missing, its value is not supported, or keys contradict
                each other; the message names the key.
        """
        kind = raw.get("model_type")
        if kind and kind not in cls.model_types:
            raise ValueError(
                f"model_type {short(kind)} in config.json does not match architectures "
                f"{raw['architectures']}, which require model_type {' or '.join(cls.model_types)}: "
                "fix it"
            )
        spelled = {field: key for key, field in cls.aliases if raw.get(key) is not None}
        family = read_fields(cls, cls.prepare(raw), cls.harmless, spelled)
        family.derive()
        return family

    @classmethod
    def prepare(cls, raw: RawConfig) -> RawConfig:
        """config.json with the key names of the schema."""
        names, share = dict(cls.aliases), "partial_rotary_factor"
        table = raw.get("rope_parameters") or {}
        keys = {key: value for key, value in raw.items() if key not in names}
        keys |= {names[key]: raw[key] for key in names if raw.get(key) is not None}
        if isinstance(table, dict) and share in table and accepts(cls, share, table[share]):
            keys.setdefault(share, table[share])  # as transformers 5 writes it
        return keys

    def derive(self) -> None:
        """Sets fields that follow from others; raises ValueError for contradictory values."""

    def stored_dtype(self) -> str | None:
        """Data type of the weights, from transformers 5's key or the older one."""
        value = self.dtype or self.torch_dtype
        return value.removeprefix("torch.") if isinstance(value, str) else None

    def head_size(self) -> int:
        """Dimensions of a head; with latent attention, the number of dimensions to which
        `partial_rotary_factor` applies."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    def rotary_size(self) -> int:
        """Number of leading dimensions per head that have rotary embedding."""
        return rotary_size(self)

    def rotary_share(self, kind: str, default: float) -> float:
        """Fraction of a head's dimensions with rotary embedding in layers of a type, from the
        type's entry in `rope_parameters`."""
        table = (self.rope_parameters or {}).get(kind)
        share = table.get("partial_rotary_factor") if isinstance(table, dict) else None
        share = default if share is None else share
        if not isinstance(share, int | float) or not 0 < share <= 1:
            raise ValueError(
                f"rope_parameters: partial_rotary_factor of {kind} in config.json must be in "
                f"(0, 1], got {short(share)}: fix it"
            )
        return float(share)

    def kv_heads(self) -> int:
        """Number of KV heads. If full-attention layers have a different number (`full_heads`), this
        is the number in sliding-window layers."""
        return self.num_key_value_heads or self.num_attention_heads

    def biases(self) -> Biases:
        """Projections that have biases."""
        return Biases(self.attention_bias, self.attention_bias, self.mlp_bias)

    def has_qk_norm(self) -> bool:
        """Whether each head of q and k is normalized with weights (QK norm)."""
        return self.use_qk_norm

    def layer_kind(self, index: int) -> str:
        """Type of a layer if `layer_types` is missing."""
        return self.layer_kinds[-1]

    def kinds_of_layers(self) -> tuple[str, ...]:
        """Type of each layer, from `layer_types`, or the family's default."""
        count, kinds = self.num_hidden_layers, self.layer_types
        if kinds is None:
            return tuple(map(self.layer_kind, range(count)))
        kinds = [self.kind_aliases.get(kind, kind) for kind in kinds]
        if len(kinds) != count or any(kind not in self.layer_kinds for kind in kinds):
            other = "".join(f" ({name})" for name, key in self.aliases if key == "layer_types")
            raise ValueError(
                f"layer_types{other} = {short(self.layer_types)} in config.json is not supported: "
                f"it must have {' or '.join(self.layer_kinds)} for each of the {count} layers"
            )
        return tuple(kinds)

    def window(self) -> int | None:
        """Number of tokens that a token in a windowed layer attends to, including itself; None for
        full attention."""
        return None

    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer; None for full attention."""
        window = self.window()
        return tuple(
            window if kind in (SLIDING, CHUNKED) else None for kind in self.kinds_of_layers()
        )

    def next_layers(self) -> int:
        """Number of multi-token prediction layers that a checkpoint may have after the model's
        layers."""
        return int(self.skips_next_layers)

    def mtp(self) -> MtpConfig | None:
        """Head for multi-token prediction that a checkpoint may have; None if it is not supported
        for this family."""
        return None

    def linear_layers(self) -> frozenset[int] | None:
        """Layers with linear attention or a convolution, which keep a state per request; None if
        the family has none."""
        if LINEAR not in self.layer_kinds:
            return None
        kinds = enumerate(self.kinds_of_layers())
        return frozenset(index for index, kind in kinds if kind == LINEAR)

    def cache_sources(self) -> dict[int, int] | None:
        """Layers that have no keys and values of their own, and the earlier layers whose KV caches
        they read; None if there are none."""
        return None

    def skipped_tensors(self) -> tuple[str, ...]:
        """Name prefixes of tensors that the checkpoint may have and that are not loaded."""
        count = self.num_hidden_layers
        following = range(count, count + self.next_layers())
        return (*self.skipped, *(f"model.layers.{layer}." for layer in following))

    def divided(self) -> dict[str, int]:
        """Additional sizes that must be divided evenly among the ranks (besides attention heads,
        MLPs and experts), by description."""
        return {}

    def rotating(self) -> tuple[bool, ...] | None:
        """Whether each layer has rotary embedding; None if all layers do, or if the model class
        decides based on the layers' windows."""
        return None

    def full_heads(self) -> HeadSizes | None:
        """Heads of full-attention layers; None if all layers have the same heads."""
        return None

    def layer_heads(self) -> tuple[int, ...] | None:
        """Number of query heads per layer; None if all layers have the same number."""
        return None

    def value_size(self) -> int | None:
        """Dimensions of a value, if they differ from those of a key; otherwise None."""
        return None

    def attention_cap(self) -> float:
        """Soft cap of attention scores (by tanh); 0 if there is none."""
        return 0.0

    def moe(self) -> MoeConfig | None:
        """The experts; None for a dense model."""
        return None

    def mla(self, rope: RopeConfig) -> MlaConfig | None:
        """Multi-head latent attention; None for other attention."""
        return None

    def block_sparse(self) -> BlockSparseConfig | None:
        """Block-sparse attention; None for other attention."""
        return None

    def mamba(self) -> MambaConfig | None:
        """The Mamba-2 layers; None if there are none."""
        return None

    def block_diffusion(self) -> tuple[int, int | None]:
        """Block size and mask token; (1, None) for an autoregressive family."""
        return 1, None

    def canvas(self) -> int | None:
        """Number of tokens per canvas (block diffusion from random tokens); None for other
        families."""
        return None

    def edit_tokens(self) -> tuple[int, int] | None:
        """Tokens that delete and insert a position of a block (block diffusion); None if the model
        has none."""
        return None

    def spans(self) -> dict[str, int]:
        """Sequence lengths up to which unsupported kinds of attention are equal to full attention,
        by description."""
        return {}

    def extra(self) -> dict[str, Any] | None:
        """Values that only the family's class reads."""
        return {key: getattr(self, key) for key in self.extra_keys} or None


class WindowedFamilyConfig(FamilyConfig):
    """config.json of a family with the same sliding window in all layers, or in those that
    `layer_types` lists."""

    layer_kinds: ClassVar[tuple[str, ...]] = (SLIDING,)

    sliding_window: Index | None = None

    def window(self) -> int | None:
        """Sliding window in tokens."""
        return self.sliding_window


class AlternatingFamilyConfig(WindowedFamilyConfig, kw_only=True):
    """config.json of a family with full attention in every n-th layer, where n is
    `sliding_window_pattern`, and sliding windows in the others, unless `layer_types` is set."""

    layer_kinds = (FULL, SLIDING)

    sliding_window_pattern: Index | str

    def layer_kind(self, index: int) -> str:
        """Full attention in every n-th layer."""
        period = period_of("sliding_window_pattern", self.sliding_window_pattern)
        return SLIDING if (index + 1) % period else FULL


def rotary_size(family: FamilyConfig, rotary_dim: int | None = None) -> int:
    """Number of leading dimensions per head that have rotary embedding, from
    `partial_rotary_factor` or `rotary_dim`, or both if they agree; all dimensions if both are
    missing."""
    head_dim, share = family.head_size(), family.partial_rotary_factor
    size = int(head_dim * (1.0 if share is None else share))
    if share is None and rotary_dim is not None:
        size = rotary_dim
    if rotary_dim not in (None, size) or not 0 < size <= head_dim:
        key = "partial_rotary_factor"
        other = "".join(f" ({name})" for name, field in family.aliases if field == key)
        named = {f"{key}{other}": share, "rotary_dim": rotary_dim}
        given = " and ".join(
            f"{name} {value}" for name, value in named.items() if value is not None
        )
        raise ValueError(
            f"{given} in config.json must specify 1 to {head_dim} (head_dim) rotary dimensions, "
            "and agree if both are set: fix it"
        )
    return size


def table(**entries: object) -> Any:
    """A field whose default is an object with these entries."""
    return msgspec.field(default_factory=lambda: dict(entries))


def period_of(key: str, value: object) -> int:
    """Validated period of layers, the value of `key`, which is read if `layer_types` is missing."""
    if type(value) is not int or value < 1:
        raise ValueError(
            f"{key} = {short(value)} in config.json must be a positive integer if layer_types is "
            "missing: fix it"
        )
    return value


def rotating_layers(flags: list[Any] | None, interval: int, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer has rotary embedding, from `no_rope_layers` (`flags`), which is 1 for
    layers that have it. If the list is missing, every n-th layer has none, where n is
    `no_rope_layer_interval`."""
    if not flags:
        return tuple(bool((index + 1) % interval) for index in range(num_layers))
    if len(flags) < num_layers or any(flag not in (0, 1) for flag in flags):
        raise ValueError(
            f"no_rope_layers = {short(flags)} in config.json must have 0 or 1 for each of the "
            f"{num_layers} layers: fix it"
        )
    return tuple(map(bool, flags[:num_layers]))


def blocks(size: int, mask_token_id: int, vocab_size: int) -> tuple[int, int]:
    """Validated block size and mask token of a block-diffusion model."""
    if size < 2 or size & (size - 1):
        raise ValueError(
            f"block_size {size} in config.json is not supported: it must be a power of two, at "
            "least 2; use another checkpoint"
        )
    if mask_token_id >= vocab_size:
        raise ValueError(
            f"mask_token_id {mask_token_id} in config.json is not in the vocabulary of "
            f"{vocab_size} tokens: fix it"
        )
    return size, mask_token_id
