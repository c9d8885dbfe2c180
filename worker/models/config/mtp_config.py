"""Configuration of heads for multi-token prediction (MTP): names of their tensors, and how they
differ between families. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class MtpConfig:
    """Head that predicts the token after the next one from the model's last hidden state and the
    next token (DeepSeek-V3, arXiv 2412.19437, section 2.2). It consists of a projection of the
    hidden state and the token's embedding, one decoder layer and a norm. It uses the model's
    embedding and, unless `lm_head` is set, the model's LM head.

    Some checkpoints have additional heads, each of which predicts one more token (`further`).
    """

    layer: str
    """Prefix of the tensor names of the head's decoder layer."""
    embedding_norm: str
    """Name of the norm of the next token's embedding."""
    hidden_norm: str
    """Name of the norm of the hidden state."""
    projection: str
    """Name of the projection of embedding and hidden state to the layer's input."""
    final_norm: str
    """Name of the norm before the LM head."""
    lm_head: str = ""
    """Name of the head's LM head; empty if it uses the model's."""
    window: int | None = None
    """Sliding window of the head's decoder layer, as in ModelConfig; None for full attention."""
    num_heads: int | None = None
    """Number of query heads of the head's layer, if it differs between the model's layers."""
    is_dense: bool = False
    """Whether the head's layer has an MLP where the model's layers have experts."""
    hidden_first: bool = False
    """Whether the projection's input begins with the hidden state, not the embedding."""
    zeroes_first: bool = True
    """Whether the embedding is replaced with zeros at position 0, as in vLLM."""
    recycles_normed: bool = True
    """Whether the next prediction starts from the output of the final norm, rather than from its
    input."""
    further: tuple[MtpConfig, ...] = ()
    """Additional heads, in order: each reads the outputs of the head before it and predicts one
    more token."""
    skipped: tuple[str, ...] = ()
    """Name prefixes of tensors of the head that are not loaded: copies of the model's embedding and
    LM head."""

    @property
    def chain(self) -> tuple[MtpConfig, ...]:
        """This head and the additional ones."""
        return (self, *self.further)

    @classmethod
    def after_layers(
        cls, index: int, *, final_norm: str = "shared_head.norm", recycles_normed: bool = True
    ) -> MtpConfig:
        """The head of DeepSeek V3 and similar families, stored as an additional layer `index`.

        Args:
            index: number of the model's layers.
            final_norm: name of the norm before the LM head, within the additional layer.
            recycles_normed: see the field `recycles_normed`.
        """
        layer = f"model.layers.{index}."
        return cls(
            layer=layer,
            embedding_norm=f"{layer}enorm",
            hidden_norm=f"{layer}hnorm",
            projection=f"{layer}eh_proj",
            final_norm=f"{layer}{final_norm}",
            recycles_normed=recycles_normed,
            skipped=(f"{layer}embed_tokens.", f"{layer}shared_head.head."),
        )

    @classmethod
    def qwen(cls) -> MtpConfig:
        """The head in the format of Qwen3-Next and Qwen3.5."""
        return cls(
            layer="mtp.layers.0.",
            embedding_norm="mtp.pre_fc_norm_embedding",
            hidden_norm="mtp.pre_fc_norm_hidden",
            projection="mtp.fc",
            final_norm="mtp.norm",
            zeroes_first=False,
        )
