"""Configuration of a gateway."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRoute:
    """One served model as its gateways see it."""

    name: str
    """Name that clients put into `model`."""
    model: str
    """Folder or Hub repository of the checkpoint: tokenizer and chat template are read here."""
    aliases: tuple[str, ...] = ()
    """Further names of the same model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayConfig:
    """What one gateway process serves and whom it lets in."""

    models: tuple[ModelRoute, ...]
    """All models behind this endpoint."""
    api_keys: tuple[str, ...] = ()
    """Keys that clients may present as `Authorization: Bearer KEY`; empty lets everyone in."""

    def __post_init__(self) -> None:
        names = [name for route in self.models for name in (route.name, *route.aliases)]
        if not names:
            raise ValueError("a gateway needs at least one model")
        doubles = sorted({name for name in names if names.count(name) > 1})
        if doubles:
            raise ValueError(f"model names must differ, served twice: {', '.join(doubles)}")
