"""Plain torch references of families without a transformers class, and their checkpoints with
random weights.

The references are written from published modeling code and papers. Names, shapes and numbers come
from released checkpoints' config.json and index files. They share no code with the code under test,
recompute every position, and compute every expert for every token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors.torch import save_file
from torch.nn.functional import layer_norm, linear, rms_norm, silu

Shapes = dict[str, tuple[int, ...]]
"""Shapes, keyed by tensor name."""


@dataclass(frozen=True, kw_only=True)
class Names:
    """Names of a checkpoint's tensors."""

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    norm: str = "model.norm"
    head: str = "lm_head"
    attention: str = "self_attn"
    query: str = "q_proj"
    key: str = "k_proj"
    value: str = "v_proj"
    joined: str = ""
    """Name of the fused tensor of queries, keys and values."""
    output: str = "o_proj"
    mlp: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    gate_up: str = ""
    """Name of the fused tensor of the gate and up projections, with the gate's rows first."""
    down: str = "down_proj"
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    """Norms before attention and before the MLP."""


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Gated MLPs, of which each token uses a few, selected by a softmax over all of them."""

    count: int
    chosen: int
    size: int
    """Intermediate size of an expert."""
    sums_to_one: bool
    """Whether the weights of a token's experts are normalized."""
    shared_size: int = 0
    """Intermediate size of the shared expert; 0 if there is none."""
    first_layer: int = 0
    """First layer with experts; earlier layers have a single MLP."""
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, kw_only=True)
class Mathematics:
    """Differences of a family from a decoder of pre-norm blocks with gated MLPs."""

    config: Mapping[str, Any]
    """Content of config.json."""
    names: Names = field(default_factory=Names)
    eps_key: str = "rms_norm_eps"
    theta_key: str = "rope_theta"
    """Key of the rotary base; the base is 10000 if the key is missing."""
    layers_key: str = "num_hidden_layers"
    head_key: str = "head_dim"
    """Key of the head size; the size is hidden_size / heads if the key is missing."""
    mlp_share: int = 1
    """Divisor of `intermediate_size`."""
    norm: Literal["rms", "layer"] = "rms"
    """Type of the norms: RMSNorm, or LayerNorm, which subtracts the mean and adds a bias."""
    rows: Literal["in order", "by kv head"] = "in order"
    """Row order of a fused tensor: all queries first, or for each KV head its queries, key and
    value."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    stretch: tuple[float, ...] = ()
    """Wavelength factors of pairs of dimensions."""
    cosine_scale: float = 1.0
    embedding_scale: float = 1.0
    branch_scale: float = 1.0
    """Factor for the outputs of attention and MLP."""
    logits_scale: float = 1.0
    has_unit_rows: bool = False
    """Whether the rows of the LM head's weight are normalized."""
    experts: Experts | None = None
    further: tuple[str, ...] = ()
    """Additional tensors of a checkpoint, which the model does not use."""


class Scores(NamedTuple):
    """Output in the format of transformers models."""

    logits: torch.Tensor
    """[1, tokens, vocabulary]."""


class Reference:
    """A decoder computed from a checkpoint's tensors."""

    def __init__(self, maths: Mathematics) -> None:
        config = maths.config
        self._maths, self._names = maths, maths.names
        self._heads: int = config["num_attention_heads"]
        self._kv_heads: int = config.get("num_key_value_heads") or self._heads
        self._head: int = config.get(maths.head_key) or config["hidden_size"] // self._heads
        self._eps: float = config[maths.eps_key]
        self._weights = {name: _draw(name, shape) for name, shape in self._shapes().items()}

    def save(self, folder: Path) -> None:
        """Writes the checkpoint."""
        further = {name: torch.ones(3) for name in self._maths.further}
        save_file({**self._weights, **further}, folder / "model.safetensors")

    def __call__(self, input_ids: torch.Tensor) -> Scores:
        """Logits after each token of `input_ids` [1, tokens]."""
        maths, names = self._maths, self._names
        embedding = self._weights[f"{names.embedding}.weight"]
        x = embedding[input_ids[0]] * maths.embedding_scale
        for index in range(maths.config[maths.layers_key]):
            layer = f"{names.layers}.{index}"
            first, second = (f"{layer}.{name}" for name in names.norms)
            x = x + self._attention(f"{layer}.{names.attention}", self._normed(first, x)) * (
                maths.branch_scale
            )
            x = x + self._mlp(f"{layer}.{names.mlp}", self._normed(second, x)) * maths.branch_scale
        head = self._weights.get(f"{names.head}.weight", embedding)
        if maths.has_unit_rows:
            head = head / head.norm(dim=1, keepdim=True)
        return Scores((self._normed(names.norm, x) @ head.T * maths.logits_scale)[None])

    def _normed(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = self._weights[f"{name}.weight"]
        if self._maths.norm == "rms":
            return rms_norm(x, x.shape[-1:], weight, self._eps)
        return layer_norm(x, x.shape[-1:], weight, self._weights[f"{name}.bias"], self._eps)

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))

    def _attention(self, name: str, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self._queries_keys_values(name, x)
        q, k = self._rotated(q), self._rotated(k)
        ratio = self._heads // self._kv_heads
        k, v = k.repeat_interleave(ratio, dim=1), v.repeat_interleave(ratio, dim=1)
        scores = torch.einsum("ihd,jhd->hij", q, k) * self._head**-0.5
        is_later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        shares = scores.masked_fill(is_later, -torch.inf).softmax(dim=-1)
        found = torch.einsum("hij,jhd->ihd", shares, v)
        return self._linear(f"{name}.{self._names.output}", found.flatten(1))

    def _queries_keys_values(self, name: str, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values, each [tokens, heads, head size]."""
        names, ratio = self._names, self._heads // self._kv_heads
        if not names.joined:
            parts = (f"{name}.{part}" for part in (names.query, names.key, names.value))
            return tuple(self._linear(part, x).unflatten(1, (-1, self._head)) for part in parts)
        heads = self._linear(f"{name}.{names.joined}", x).unflatten(1, (-1, self._head))
        if self._maths.rows == "in order":
            q, k, v = heads.split([self._heads, self._kv_heads, self._kv_heads], dim=1)
            return q, k, v
        groups = heads.unflatten(1, (self._kv_heads, ratio + 2))
        return groups[:, :, :ratio].flatten(1, 2), groups[:, :, -2], groups[:, :, -1]

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        """Rotates pairs from the first and second half of a head's dimensions."""
        maths, pairs = self._maths, self._head // 2
        theta = maths.config.get(maths.theta_key, 10000.0)
        waves = theta ** (torch.arange(pairs) / pairs) * torch.tensor(maths.stretch or [1.0])
        angles = (torch.arange(len(x))[:, None] / waves)[:, None]
        cos, sin = angles.cos() * maths.cosine_scale, angles.sin() * maths.cosine_scale
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def _mlp(self, name: str, x: torch.Tensor) -> torch.Tensor:
        names = self._names
        if f"{name}.gate.weight" in self._weights:
            return self._mixture(name, x)
        if names.gate_up:
            gate, up = self._linear(f"{name}.{names.gate_up}", x).chunk(2, dim=-1)
            return self._linear(f"{name}.{names.down}", silu(gate) * up)
        return self._gated(name, x, (names.gate, names.up, names.down))

    def _gated(self, name: str, x: torch.Tensor, names: tuple[str, str, str]) -> torch.Tensor:
        gate, up = (self._linear(f"{name}.{part}", x) for part in names[:2])
        return self._linear(f"{name}.{names[2]}", silu(gate) * up)

    def _mixture(self, name: str, x: torch.Tensor) -> torch.Tensor:
        experts, names = self._maths.experts, self._names
        assert experts is not None
        shares = self._linear(f"{name}.gate", x).softmax(dim=-1)
        kept = shares.topk(experts.chosen, dim=-1)
        shares = torch.zeros_like(shares).scatter(1, kept.indices, kept.values)
        if experts.sums_to_one:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        found = torch.zeros_like(x)
        if experts.shared_size:
            shared = (names.gate, names.up, names.down)
            found = self._gated(f"{name}.shared_experts", x, shared)
        for number in range(experts.count):
            own = self._gated(f"{name}.experts.{number}", x, experts.names)
            found = found + shares[:, number, None] * own
        return found

    def _shapes(self) -> Shapes:
        """Shapes of a checkpoint's tensors."""
        maths, names, config = self._maths, self._names, self._maths.config
        hidden, vocabulary = config["hidden_size"], config["vocab_size"]
        shapes: Shapes = {f"{names.embedding}.weight": (vocabulary, hidden)}
        if not config.get("tie_word_embeddings", False):
            shapes[f"{names.head}.weight"] = (vocabulary, hidden)
        layers = [f"{names.layers}.{index}" for index in range(config[maths.layers_key])]
        norms = [f"{layer}.{norm}" for layer in layers for norm in names.norms]
        for norm in (*norms, names.norm):
            shapes[f"{norm}.weight"] = (hidden,)
            if maths.norm == "layer":
                shapes[f"{norm}.bias"] = (hidden,)
        for index, layer in enumerate(layers):
            shapes.update(self._shapes_of_attention(f"{layer}.{names.attention}"))
            shapes.update(self._shapes_of_mlp(f"{layer}.{names.mlp}", index))
        return shapes

    def _shapes_of_attention(self, name: str) -> Shapes:
        maths, names, hidden = self._maths, self._names, self._maths.config["hidden_size"]
        queries, keys = self._heads * self._head, self._kv_heads * self._head
        own = {names.query: queries, names.key: keys, names.value: keys}
        parts = {names.joined: queries + 2 * keys} if names.joined else own
        shapes: Shapes = {}
        for part, size in parts.items():
            shapes.update(_shapes_of_linear(f"{name}.{part}", size, hidden, maths.qkv_bias))
        output = f"{name}.{names.output}"
        return {**shapes, **_shapes_of_linear(output, hidden, queries, maths.output_bias)}

    def _shapes_of_mlp(self, name: str, layer: int) -> Shapes:
        maths, names, hidden = self._maths, self._names, self._maths.config["hidden_size"]
        experts, own = maths.experts, (names.gate, names.up, names.down)
        if experts is not None and layer >= experts.first_layer:
            shapes: Shapes = {f"{name}.gate.weight": (experts.count, hidden)}
            for number in range(experts.count):
                expert = f"{name}.experts.{number}"
                shapes.update(self._shapes_of_gated(expert, experts.size, experts.names))
            if experts.shared_size:
                shared = f"{name}.shared_experts"
                shapes.update(self._shapes_of_gated(shared, experts.shared_size, own))
            return shapes
        size = maths.config["intermediate_size"] // maths.mlp_share
        if names.gate_up:
            joined = _shapes_of_linear(f"{name}.{names.gate_up}", 2 * size, hidden, maths.mlp_bias)
            down = _shapes_of_linear(f"{name}.{names.down}", hidden, size, maths.mlp_bias)
            return {**joined, **down}
        return self._shapes_of_gated(name, size, own)

    def _shapes_of_gated(self, name: str, size: int, names: tuple[str, str, str]) -> Shapes:
        maths, hidden = self._maths, self._maths.config["hidden_size"]
        shapes: Shapes = {}
        for part, shape in zip(
            names, ((size, hidden), (size, hidden), (hidden, size)), strict=True
        ):
            shapes.update(_shapes_of_linear(f"{name}.{part}", *shape, maths.mlp_bias))
        return shapes


def write_reference(maths: Mathematics, folder: Path) -> Reference:
    """Saves a checkpoint with random weights and returns its reference model."""
    model = Reference(maths)
    model.save(folder)
    (folder / "config.json").write_text(json.dumps(maths.config))
    return model


def _shapes_of_linear(name: str, out: int, size: int, bias: bool) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (out, size)}
    return {**shapes, f"{name}.bias": (out,)} if bias else shapes


def _draw(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Random values that do not hide any feature: norms are not 1, biases are not 0, and all layers
    matter."""
    numbers = torch.randn(shape)
    if name.endswith("bias"):
        return numbers * 0.3
    if len(shape) == 1:
        return 1.0 + numbers * 0.3
    is_of_vocabulary = any(part in name for part in ("embed", "wte", "lm_head", "output.weight"))
    return numbers * (0.4 if is_of_vocabulary else 1.5 * shape[-1] ** -0.5)
