"""Base class of all decoder models: embedding, layers, final norm and logits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch

from kernels import Fp8Inputs
from kernels.native import NativeDecoder, NativeEncoder
from worker.models.architectures.mtp import HeadLayer, MtpHead
from worker.models.config.model_config import ModelConfig
from worker.models.layers.context import ForwardContext
from worker.models.layers.kv_cache import CachingLayer, KVCacheSpec, StateSpec
from worker.models.layers.linear import ParallelLMHead, Rows, VocabParallelEmbedding
from worker.models.layers.linear_method import LayerOptions, WeightSlot
from worker.models.layers.norms import HiddenNorm, RMSNorm
from worker.models.layers.pooling_head import LinearHead, PoolingHead
from worker.models.layers.rope import cos_sin_table, query_scales


class Module(Protocol):
    """A part of a model that has weights."""

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Slots of all weights of the part; `prefix` ends with a dot."""
        ...

    def process_after_loading(self) -> None:
        """Converts the loaded weights to the form in which they are used."""
        ...


class FeedForward(Module, Protocol):
    """Feed-forward block of a layer: an MLP, or experts."""

    needs_fp32: ClassVar[bool]
    """Whether the block also reads its input in fp32, as routers do."""

    def forward(self, hidden: torch.Tensor, fp32_input: torch.Tensor | None = None) -> torch.Tensor:
        """Maps inputs [T, hidden] to outputs [T, hidden]. `fp32_input` is the same input in fp32,
        or None if the block does not need it."""
        ...


@runtime_checkable
class Fp8FeedForward(FeedForward, Protocol):
    """Feed-forward block whose input may be quantized to FP8."""

    @property
    def fp8_inputs(self) -> Fp8Inputs | None:
        """FP8 input format that `forward` supports; None if it only accepts unquantized rows."""
        ...

    def forward(self, hidden: Rows, fp32_input: torch.Tensor | None = None) -> torch.Tensor:
        """Maps inputs [T, hidden] to outputs [T, hidden]."""
        ...


class DecoderLayer(Module, Protocol):
    """One decoder layer: norms, mixer, feed-forward block and residuals."""

    kv_cache_spec: KVCacheSpec | None
    """Specification of the layer's KV cache; None if there is none."""
    state_spec: StateSpec | None
    """Specification of the layer's state per request; None if there is none."""

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        ctx: ForwardContext,
        logits_indices: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Runs the layer on hidden states [T, hidden].

        Args:
            hidden: output of the previous layer.
            residual: [T, hidden]: sum to which `hidden` has yet to be added; None if it is zero, as
                before the first layer.
            positions: [T] int64.
            ctx: caches and planned attention of the step.
            logits_indices: in the last layer, the tokens [S] whose output is needed; None for all.

        Returns:
            Output of the layer, and the residual to which it has yet to be added, [T, hidden] or
            [S, hidden] each.
        """
        ...


class TapReader(Protocol):
    """A head that reads hidden states between layers of the model (`eagle.EagleHead`)."""

    @property
    def taps(self) -> Sequence[int]:
        """Layers before which hidden states are read."""
        ...

    def read(self, states: Sequence[torch.Tensor]) -> None:
        """Receives the hidden states of a step, [T, hidden] for each of `taps`."""
        ...


class DecoderModel(ABC):
    """A decoder-only language model on one rank; its weights are uninitialized until they are
    loaded.

    Args:
        config: the model's configuration.
        options: options of all layers: ranks, data type, device.
        max_model_len: maximum number of tokens of a request.

    Raises:
        ValueError: the model cannot be split evenly across the ranks.
    """

    embedding_name: ClassVar[str] = "model.embed_tokens"
    """Name of the embedding in a checkpoint."""
    layers_name: ClassVar[str] = "model.layers"
    """Name of the stack of layers in a checkpoint."""
    norm_name: ClassVar[str] = "model.norm"
    """Name of the final norm in a checkpoint."""
    head_name: ClassVar[str] = "lm_head"
    """Name of the LM head in a checkpoint."""
    head_has_bias: ClassVar[bool] = False
    """Whether the LM head has a bias."""
    norm_offset: ClassVar[float] = 0.0
    """Number added to the norm weights of a checkpoint."""
    scales_head: ClassVar[bool] = False
    """Whether rows of the LM head are scaled after loading."""
    runs_natively: ClassVar[bool] = False
    """Whether the compiled CPU library computes the same function as this class. The library reads
    the layers' weights and never calls `forward`, so each derived class must declare this
    itself."""

    def __init__(self, config: ModelConfig, options: LayerOptions, max_model_len: int) -> None:
        self.config = config
        self.options = options
        self.native: NativeDecoder | None = None
        """Compiled decoder that runs the whole forward pass in place of `forward`; None if torch
        runs it."""
        self.encoder: NativeEncoder | None = None
        """Compiled encoder that runs the whole forward pass in place of `forward`; None if torch
        runs it."""
        rotary_dim = config.for_full_layers().rotary_dim
        # For a million positions, a table takes hundreds of MB.
        length = max_model_len if any(map(self.rotates, range(config.num_layers))) else 1
        self.cos_sin = cos_sin_table(config.rope, rotary_dim, length, options.device)
        self.window_cos_sin = self.cos_sin
        if config.window_rope is not None:
            self.window_cos_sin = cos_sin_table(
                config.window_rope, config.rotary_dim, max_model_len, options.device
            )
        self.windows = config.windows_within(max_model_len)
        """Sliding window per layer: number of positions that a query attends to, including its own;
        0 for full attention."""
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, options)
        self.layers = [self.build_layer(index) for index in range(config.num_layers)]
        self.norm = self.build_norm()
        self.lm_head = ParallelLMHead(
            *(config.vocab_size, config.hidden_size, options),
            tied=config.tie_word_embeddings or config.pooling is not None,
            has_bias=self.head_has_bias and config.pooling is None,
        )
        self.pooling_head: PoolingHead | None = None
        """Classification head; None for models that generate text or return embeddings. A pooling
        model computes no token logits, so its LM head is not loaded."""
        if config.pooling is not None and config.pooling.info.task == "classify":
            self.pooling_head = self.build_pooling_head()
            if config.pooling.token_ids:
                self._check_head()
        self.mtp: MtpHead | None = None
        """First head for multi-token prediction (MTP), which holds the others; None if MTP heads
        are not loaded."""
        if config.loads_mtp:
            assert config.mtp is not None, "with_mtp checks it"
            self.mtp, *further = (
                MtpHead(mtp, self.build_head_layer(index), index, self.build_norm, config, options)
                for index, mtp in enumerate(config.mtp.chain, config.num_layers)
            )
            self.mtp.further = tuple(further)
        self.tap_reader: TapReader | None = None
        """EAGLE-3 head, which has its own checkpoint; None if the model runs without one."""

    @abstractmethod
    def build_layer(self, index: int) -> DecoderLayer:
        """Builds layer `index`; called after configuration, options and rotary tables are set."""

    def build_head_layer(self, index: int) -> HeadLayer:
        """Builds the decoder layer `index` of an MTP head, by default like a layer that follows the
        model's last one."""
        return self.build_layer(index)

    def layer_name(self, index: int) -> str:
        """Name of a layer in a checkpoint."""
        return f"{self.layers_name}.{index}"

    def rotates(self, index: int) -> bool:
        """Whether config.json specifies rotary embedding for layer `index`."""
        return self.config.rotating is None or self.config.rotating[index]

    def rotary_table(self, index: int) -> torch.Tensor:
        """Cosines and sines [positions, rotary_dim] of a layer; sliding-window layers may have a
        separate table."""
        return self.cos_sin if self.config.windows[index] is None else self.window_cos_sin

    def build_norm(self) -> HiddenNorm:
        """Builds a norm of hidden states, used in the layers and as the final norm."""
        size, eps = self.config.hidden_size, self.config.rms_norm_eps
        return RMSNorm(size, eps, self.options, self.norm_offset)

    def build_pooling_head(self) -> PoolingHead:
        """Builds the classification head of a pooling model."""
        return LinearHead(self.config, self.options)

    @cached_property
    def query_scale(self) -> torch.Tensor | None:
        """Factors applied to queries, by position, fp32 [positions]; None if queries are not
        scaled. Only configurations with `llama_4_scaling_beta` scale them."""
        return query_scales(self.config.rope, len(self.cos_sin), self.options.device)

    def extra(self, key: str) -> Any:
        """Value of a configuration key that only this class reads (`FamilyConfig.extra`)."""
        assert self.config.extra is not None, "the family's schema lists the keys"
        return self.config.extra[key]

    def weight_slots(self) -> Iterator[WeightSlot]:
        """Weight slots for all tensors that the checkpoint must contain."""
        yield from self.embed_tokens.weight_slots(self.embedding_name)
        for index, layer in enumerate(self.layers):
            yield from layer.weight_slots(f"{self.layer_name(index)}.")
        yield from self.norm.weight_slots(self.norm_name)
        if self.pooling_head is not None:
            tied = self.config.tie_word_embeddings
            yield from self.pooling_head.weight_slots(
                self.embedding_name if tied else self.head_name
            )
        if self.config.pooling is None:
            yield from self.lm_head.weight_slots(self.head_name)
        if self.mtp is not None:
            yield from self.mtp.weight_slots()

    @property
    def caching_layers(self) -> Sequence[CachingLayer]:
        """All layers of the model and of its MTP heads, by index."""
        if self.mtp is None:
            return self.layers
        return [*self.layers, self.mtp.layer, *(head.layer for head in self.mtp.further)]

    def _check_head(self) -> None:
        """Raises ValueError if logits are not plain dot products of hidden states and rows of the
        LM head."""
        is_plain = type(self).compute_logits is DecoderModel.compute_logits
        if self.head_has_bias or self.scales_head or not is_plain:
            raise ValueError(
                f"--task score is not supported for {self.config.architecture}, whose logits have "
                "biases or are scaled: use a *ForSequenceClassification checkpoint"
            )

    def process_after_loading(self) -> None:
        """Converts the loaded weights to the form in which torch uses them, except those that
        `native` or `encoder` has packed."""
        if self.mtp is not None:
            self.mtp.process_after_loading(self.embed_tokens)
        if self.native is not None:
            if self.mtp is None or self.mtp.native is not None:
                self.embed_tokens.drop()
            self.lm_head.drop()
            return
        if self.encoder is not None:
            return
        for layer in self.layers:
            layer.process_after_loading()
        if self.config.pooling is None:
            self.lm_head.process_after_loading(self.embed_tokens)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Maps token ids [T] to the first layer's input [T, hidden]."""
        return self.embed_tokens.forward(input_ids)

    def embed_shares(self, shares: torch.Tensor) -> torch.Tensor:
        """Maps distributions over tokens [T, vocab_size], in the model's data type, to weighted
        averages of the token embeddings [T, hidden]."""
        return self.embed_tokens.average(shares)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext
    ) -> torch.Tensor:
        """Maps token ids [T] and positions [T] int64 to hidden states [T, hidden] after the final
        norm, or [S, hidden] for the tokens in the context's `logits_indices`."""
        return self.forward_embedded(self.embed(input_ids), positions, ctx)

    def forward_embedded(
        self, hidden: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext
    ) -> torch.Tensor:
        """Same as `forward`, but starts from the first layer's input [T, hidden] instead of token
        ids."""
        hidden, residual = self.run_layers(hidden, positions, ctx)
        if not len(hidden):
            return hidden
        if residual is None:
            return self.norm.forward(hidden)
        return self.norm.forward_add(hidden, residual)[0]

    def run_layers(
        self, hidden: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Runs all layers on the first layer's input [T, hidden]; returns output and residual as in
        DecoderLayer, for the tokens in the context's `logits_indices` or for all."""
        residual: torch.Tensor | None = None
        reader, taps = self.tap_reader, dict[int, torch.Tensor]()
        for index, layer in enumerate(self.layers):
            if reader is not None and index in reader.taps:
                taps[index] = hidden if residual is None else hidden + residual
            logits_indices = ctx.logits_indices if layer is self.layers[-1] else None
            hidden, residual = layer.forward(hidden, residual, positions, ctx, logits_indices)
        if reader is not None:
            reader.read([taps[index] for index in reader.taps])
        return hidden, residual

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Computes fp32 logits [R, vocab_size] from the hidden states [R, hidden] of the rows to
        sample."""
        if self.native is not None:
            logits = self.native.logits(hidden)
            return logits if self.options.group.world_size == 1 else self.lm_head.gather(logits)
        return self.lm_head.forward(hidden)
