"""Requests in progress: their placement on workers, their output and their end."""

from router.serving.adapters import AdapterRegistry
from router.serving.completion import Completion
from router.serving.generation import Generation, GenerationRequest
from router.serving.model import ServedModel
from router.serving.settings import SettingsStore

__all__ = [
    "AdapterRegistry",
    "Completion",
    "Generation",
    "GenerationRequest",
    "ServedModel",
    "SettingsStore",
]
