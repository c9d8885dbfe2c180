"""EAGLE-3 head, whose predictions are the drafts of speculative decoding.

    taps of the model at position i ──fc──> x ─┐
    embedding of token i + 1 ──────────────────┴─> layer ──norm, LM head──> token i + 2

Configuration and names: `config/eagle_config.py`. EAGLE-3: arXiv 2503.01840.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from worker.models.architectures.decoder import DecoderModel
from worker.models.architectures.deepseek import LatentAttention
from worker.models.architectures.llama import PreNormLayer
from worker.models.config.eagle_config import EagleConfig
from worker.models.config.model_config import ModelConfig
from worker.models.layers.attention import Attention, AttentionTraits, GatedMLP
from worker.models.layers.context import ForwardContext
from worker.models.layers.linear import (
    ColumnParallelLinear,
    ParallelLMHead,
    VocabParallelEmbedding,
    whole_part,
)
from worker.models.layers.linear_method import LayerOptions, UnquantizedMethod, WeightSlot
from worker.models.layers.norms import RMSNorm
from worker.models.layers.rope import cos_sin_table


class EagleLayer:
    """Decoder layer of a head. Its attention reads the concatenation of the next token's embedding
    and a hidden state.

    Args:
        config: the head's sizes; its attention is latent (MLA) or Llama's.
        options: options of the head's layers.
        layer_index: index among the model's layers.
        cos_sin: rotary table [positions, rotary_dim].
        norm_before_residual: as in EagleConfig.
    """

    def __init__(
        self,
        config: ModelConfig,
        options: LayerOptions,
        *,
        layer_index: int,
        cos_sin: torch.Tensor,
        norm_before_residual: bool,
    ) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        self.attention: Attention | LatentAttention
        if config.mla is None:
            self.attention = Attention(
                *(config, options),
                layer_index=layer_index,
                cos_sin=cos_sin,
                traits=AttentionTraits(),
                input_size=2 * size,
            )
        else:
            self.attention = LatentAttention(
                *(config, options),
                layer_index=layer_index,
                cos_sin=cos_sin,
                eps=eps,
                input_size=2 * size,
            )
        assert self.attention.kv_cache_spec is not None, "attention has a KV cache"
        self.kv_cache_spec = self.attention.kv_cache_spec
        self.mlp = GatedMLP(config, options)
        self.embedding_norm, self.hidden_norm, self.mlp_norm = (
            RMSNorm(size, eps, options) for _ in range(3)
        )
        self._norm_before_residual = norm_before_residual

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """Weight slots of the layer; `prefix` ends with a dot."""
        yield from self.attention.weight_slots(f"{prefix}self_attn.")
        yield from self.mlp.weight_slots(f"{prefix}mlp.")
        yield from self.embedding_norm.weight_slots(f"{prefix}input_layernorm")
        yield from self.hidden_norm.weight_slots(f"{prefix}hidden_norm")
        yield from self.mlp_norm.weight_slots(f"{prefix}post_attention_layernorm")

    def process_after_loading(self) -> None:
        """Packs attention and MLP after loading."""
        self.attention.process_after_loading()
        self.mlp.process_after_loading()

    def forward(
        self,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        ctx: ForwardContext,
        logits_indices: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output of the MLP, and the residual to which it has yet to be added, [T, hidden] or
        [S, hidden] each; arguments as in `EagleHead.forward`."""
        normed = self.hidden_norm.forward(hidden)
        residual = normed if self._norm_before_residual else hidden
        both = torch.cat((self.embedding_norm.forward(embedded), normed), dim=-1)
        attended = self.attention.forward(both, positions, ctx, logits_indices)
        if logits_indices is not None:
            residual = residual.index_select(0, logits_indices)
        normed, residual = self.mlp_norm.forward_add(attended, residual)
        return self.mlp.forward(normed), residual


class EagleHead:
    """Predicts the token after the next one: at position i, it reads hidden states of the model
    before some of its layers (taps), and the embedding of the token at position i + 1.

    As in vLLM, the layer's keys and values belong to position i. The head uses the model's
    embedding and LM head unless its checkpoint has its own.

    Args:
        eagle: the head's configuration.
        model: the model, whose taps the head reads.
        num_positions: maximum number of positions of a request.

    Raises:
        ValueError: the model's layers do not provide taps.
    """

    def __init__(self, eagle: EagleConfig, model: DecoderModel, num_positions: int) -> None:
        _check_layers(model)
        options = replace(model.options, linear_method=UnquantizedMethod(), quantizes_fp8=False)
        config, eps = eagle.head, eagle.head.rms_norm_eps
        self.taps = eagle.taps
        """Layers of the model before which hidden states are read."""
        self.layer_index = model.config.num_layers
        """Index of the head's layer among the model's."""
        self.hidden_size = config.hidden_size
        self.config = config
        """Configuration of the head's checkpoint."""
        self._eagle, self._model, self._options = eagle, model, options
        self.layer = EagleLayer(
            *(config, options),
            layer_index=self.layer_index,
            cos_sin=cos_sin_table(config.rope, config.rotary_dim, num_positions, options.device),
            norm_before_residual=eagle.norm_before_residual,
        )
        # Norms and the projection of the taps, replicated: they are small.
        width = len(eagle.taps) * eagle.target_hidden_size
        self._input_norm = RMSNorm(width, eps, options) if eagle.norm_before_fc else None
        self._tap_norms: list[RMSNorm] | None = None
        if eagle.fc_norm:
            self._tap_norms = [RMSNorm(eagle.target_hidden_size, eps, options) for _ in self.taps]
        parts = [whole_part("fc", config.hidden_size)]
        self._projection = ColumnParallelLinear(width, parts, bias=False, options=options)
        self._norm = RMSNorm(config.hidden_size, eps, options)
        # Vocabulary.
        self._embedding: VocabParallelEmbedding | None = None
        if eagle.has_embedding:
            self._embedding = VocabParallelEmbedding(config.vocab_size, config.hidden_size, options)
        self._lm_head: ParallelLMHead | None = None
        if eagle.has_lm_head:
            sizes = eagle.draft_vocab_size, config.hidden_size
            self._lm_head = ParallelLMHead(*sizes, options, tied=False)
        self._offsets: torch.Tensor | None = None
        """int64 [draft_vocab_size]: id of each draft token in the model's vocabulary, minus its
        draft id; None if the head predicts all tokens."""
        self._token_ids: torch.Tensor | None = None
        """int64 [draft_vocab_size]: id of each draft token in the model's vocabulary; None if the
        head predicts all tokens."""
        if eagle.is_reduced:
            self._offsets = torch.zeros(
                eagle.draft_vocab_size, dtype=torch.int64, device=options.device
            )
        self._inputs = torch.empty(0, config.hidden_size)

    def weight_slots(self) -> Iterator[WeightSlot]:
        """Weight slots for all tensors of the head."""
        yield from self._projection.weight_slots("")
        yield from self.layer.weight_slots("layers.0.")
        yield from self._norm.weight_slots("norm")
        if self._input_norm is not None:
            yield from self._input_norm.weight_slots("input_norm")
        for index, norm in enumerate(self._tap_norms or ()):
            yield from norm.weight_slots(f"fc_norm.{index}")
        if self._embedding is not None:
            yield from self._embedding.weight_slots("embed_tokens")
        if self._lm_head is not None:
            yield from self._lm_head.weight_slots("lm_head")
        yield from self._offset_slots()

    def process_after_loading(self) -> None:
        """Packs the loaded weights.

        Raises:
            ValueError: `d2t` maps a token to an id outside the model's vocabulary.
        """
        self._projection.process_after_loading()
        self.layer.process_after_loading()
        if self._lm_head is not None:
            self._lm_head.process_after_loading(self._model.embed_tokens)
        if self._offsets is None or self._offsets.is_meta:
            return
        ids = self._offsets + torch.arange(len(self._offsets), device=self._offsets.device)
        lowest, highest = torch.stack(ids.aminmax()).tolist()
        if lowest < 0 or highest >= self._eagle.head.vocab_size:
            raise ValueError(
                f"d2t in {self._eagle.head.folder} maps tokens to ids outside the vocabulary of "
                f"{self._eagle.head.vocab_size}: download the head again"
            )
        self._token_ids = ids

    def allocate(self, num_tokens: int) -> None:
        """Allocates the static buffer of the layer's inputs for steps of `num_tokens` tokens."""
        options = self._options
        self._inputs = torch.zeros(
            num_tokens, self.hidden_size, dtype=options.dtype, device=options.device
        )

    def read(self, states: Sequence[torch.Tensor]) -> None:
        """Computes the layer's inputs from the taps of a step, [T, model's hidden] each."""
        if self._tap_norms is not None:
            pairs = zip(self._tap_norms, states, strict=True)
            states = [norm.forward(state) for norm, state in pairs]
        joined = torch.cat(tuple(states), dim=-1)
        if self._input_norm is not None:
            joined = self._input_norm.forward(joined)
        self._inputs[: len(joined)].copy_(self._projection.forward(joined))

    def inputs(self, num_tokens: int) -> torch.Tensor:
        """Inputs [T, hidden] of the layer for the tokens of the latest step; valid until the next
        forward pass of the model."""
        return self._inputs[:num_tokens]

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Maps token ids [T] to embeddings [T, hidden]."""
        return (self._embedding or self._model.embed_tokens).forward(token_ids)

    def forward(
        self,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        ctx: ForwardContext,
        logits_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes outputs [T, hidden], or [S, hidden] for the tokens in `logits_indices`. They are
        inputs of `compute_logits` and of predictions of further tokens.

        Args:
            embedded: [T, hidden]: embeddings of the tokens after `positions`.
            hidden: [T, hidden]: `inputs` at `positions`, or outputs of an earlier call.
            positions: [T] int64.
            ctx: caches and planned attention of the step, including those of `layer_index`.
            logits_indices: int64 [S], ascending: tokens whose outputs are needed; None for all.
        """
        out, residual = self.layer.forward(embedded, hidden, positions, ctx, logits_indices)
        total = out + residual
        return self._norm.forward(total) if self._eagle.norm_output else total

    def compute_logits(
        self, outputs: torch.Tensor, shared: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Maps outputs [R, hidden] to fp32 logits [R, the model's vocab_size]; -inf for tokens that
        the head cannot predict.

        Args:
            outputs: [R, hidden]: from `forward`.
            shared: the model's LM head, used if the head has none of its own.
        """
        hidden = outputs if self._eagle.norm_output else self._norm.forward(outputs)
        if self._lm_head is None:
            return shared(hidden)
        logits = self._lm_head.forward(hidden)
        if self._token_ids is None:
            return logits
        shape = len(logits), self._eagle.head.vocab_size
        return logits.new_full(shape, float("-inf")).index_copy_(1, self._token_ids, logits)

    def _offset_slots(self) -> Iterator[WeightSlot]:
        if self._offsets is not None:
            yield WeightSlot(
                name="d2t",
                destination=self._offsets,
                full_shape=tuple(self._offsets.shape),
                source_types=("I64",),
                fill_dummy=torch.Tensor.zero_,
            )


def _check_layers(model: DecoderModel) -> None:
    """Raises ValueError if hidden states between layers are not simply the sum of a layer's output
    and residual."""
    is_plain = type(model).run_layers is DecoderModel.run_layers and all(
        isinstance(layer, PreNormLayer) and all(norm.block_scale == 1.0 for norm in layer.norms)
        for layer in model.layers
    )
    if not is_plain:
        raise ValueError(
            f"--speculative-method eagle3 is not supported for {model.config.architecture}: use "
            "ngram, or draft with a smaller model"
        )
