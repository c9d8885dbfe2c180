"""LoRA adapters of a model's embedding and LM head on one rank.

Each rank has the rows for its part of the vocabulary: rows of A (transposed) for the embedding, and
rows of B for the LM head. The two layers have separate adapters even if their weights are tied, as
in PEFT.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kernels.lora import LoraPart, LoraWeights, padded_rank
from worker.models.architectures.decoder import DecoderModel
from worker.models.config.peft import CONFIG_NAME
from worker.models.layers.lora import LoraEmbedding, LoraFactors, LoraLayer, LoraRows
from worker.models.loading.adapter_tensors import EMBEDDING, LINEAR, AdapterTensors, Factors

OPTION = "--enable-lora-embeddings"
"""Flag that enables these adapters."""


class VocabularyAdapters:
    """Adapters of the embedding and the LM head. Adds buffers to the two layers.

    Args:
        max_loras: number of slots on the device.
        max_rank: maximum rank of an adapter.
        is_native: whether the compiled CPU library computes the LoRA matmuls.
        rows: adapters of the step's tokens.

    Raises:
        ValueError: the model does not support them.
    """

    def __init__(
        self, model: DecoderModel, *, max_loras: int, max_rank: int, is_native: bool, rows: LoraRows
    ) -> None:
        config = model.config
        if config.mask_token_id is not None or config.canvas is not None or model.scales_head:
            raise ValueError(f"{OPTION} is not supported for {config.architecture}: remove it")
        self._model = model
        self._sizes = (max_loras, max_rank, is_native)
        self.head_rows: LoraRows | None = None
        """Adapters of the rows whose logits are computed; None if there is no LM head, as in
        pooling models."""
        embedding, head = model.embed_tokens, model.lm_head
        hidden_size = embedding.shape[1]
        weights = self._allocate(padded_rank(max_rank), hidden_size)
        embedding.lora = LoraEmbedding(weights, embedding.local_size, rows)
        self.layers: dict[str, LoraEmbedding | LoraLayer] = {model.embedding_name: embedding.lora}
        """The layers by their names in a checkpoint."""
        if config.pooling is None:
            self.head_rows = LoraRows()
            weights = self._allocate(hidden_size, head.shape[0])
            head.lora = self.layers[model.head_name] = LoraLayer(weights, self.head_rows)

    def read(
        self, modules: Mapping[str, str], tensors: AdapterTensors
    ) -> Sequence[LoraFactors | None]:
        """An adapter's weights by layer, in the order of `layers`; None for layers that it does not
        change.

        Args:
            modules: names in the file of the layers that the adapter changes, keyed by their names
                in `layers`.
            tensors: the adapter's tensors.

        Raises:
            ValueError: the adapter has a different vocabulary, or its layers are tied.
        """
        tensors.check_base(set(modules.values()), self._model.embed_tokens.shape)
        if modules and self._model.config.tie_word_embeddings and tensors.config.ties_weights:
            raise ValueError(
                f"ensure_weight_tying in {CONFIG_NAME} is not supported for embeddings: train "
                "without it, or merge the adapter into the model"
            )
        embedding, head = self._model.embedding_name, self._model.head_name
        read = {embedding: self._read_embedding, head: self._read_head}
        return [
            read[name](modules[name], tensors) if name in modules else None for name in self.layers
        ]

    def _allocate(self, in_features: int, out_features: int) -> LoraWeights:
        (max_loras, max_rank, is_native), options = self._sizes, self._model.options
        return LoraWeights.allocate(
            num_slots=max_loras,
            in_features=in_features,
            parts=[LoraPart(0, out_features, 0)],
            rank=max_rank,
            dtype=options.dtype,
            device=options.device,
            batch_invariant=options.batch_invariant,
            is_native=is_native,
        )

    def _read_embedding(self, name: str, tensors: AdapterTensors) -> LoraFactors:
        """Factors of the embedding: [local tokens, r] and [r, hidden]."""
        rank, (num_tokens, hidden_size) = (
            tensors.config.rank_of(name),
            self._model.embed_tokens.shape,
        )
        factors = _factors(name, EMBEDDING, tensors)
        first = tensors.slice(name + factors.a, (rank, num_tokens))[:, self._own_tokens()]
        second = tensors.slice(name + factors.b, (hidden_size, rank))[:]
        return self._factors(name, self._padded(first.t()), self._scaled(name, second, tensors).t())

    def _read_head(self, name: str, tensors: AdapterTensors) -> LoraFactors:
        """Factors of the LM head: [1, r, hidden] and [r, local tokens]."""
        rank, (num_tokens, hidden_size) = (
            tensors.config.rank_of(name),
            self._model.embed_tokens.shape,
        )
        factors = _factors(name, LINEAR, tensors)
        first = tensors.slice(name + factors.a, (rank, hidden_size))[:]
        second = tensors.slice(name + factors.b, (num_tokens, rank))[self._own_tokens()]
        second = self._padded(self._scaled(name, second, tensors))
        return self._factors(name, first.unsqueeze(0), second.t())

    def _own_tokens(self) -> slice:
        embedding = self._model.embed_tokens
        num_tokens, _ = embedding.shape
        start = min(embedding.start, num_tokens)
        return slice(start, min(start + embedding.local_size, num_tokens))

    def _padded(self, rows: torch.Tensor) -> torch.Tensor:
        """The rank's rows [tokens, r] padded with zeros to the size of its part of the
        vocabulary."""
        missing = self._model.embed_tokens.local_size - len(rows)
        return torch.nn.functional.pad(rows, (0, 0, 0, missing))

    def _scaled(self, name: str, second: torch.Tensor, tensors: AdapterTensors) -> torch.Tensor:
        return second.float() * tensors.config.scale_of(name)

    def _factors(self, name: str, a: torch.Tensor, b: torch.Tensor) -> LoraFactors:
        options = self._model.options
        a, b = (one.to(options.dtype).contiguous() for one in (a, b))
        if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
            raise ValueError(
                f"{name} has weights that are not finite in {options.dtype}: use another adapter, "
                "or another --dtype"
            )
        if options.device.type == "cuda":
            a, b = a.pin_memory(), b.pin_memory()
        return LoraFactors(a=a, b=b)


def _factors(name: str, expected: Factors, tensors: AdapterTensors) -> Factors:
    """Checks that a layer's tensors have the `expected` name suffixes; returns these.

    Raises:
        ValueError: they belong to a different kind of layer.
    """
    if tensors.modules[name] != expected:
        raise ValueError(
            f"{name} has no {expected.a.strip('.')}: the adapter is for another model; use one for "
            "this model"
        )
    return expected
