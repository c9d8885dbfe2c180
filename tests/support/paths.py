"""Paths of the repository and of the models in it."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "deploy" / "models"
"""Folder of the demo models."""
DEMO = MODELS / "demo"
"""Autoregressive demo model, which can add numbers."""
