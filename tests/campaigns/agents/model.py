"""Checkpoint for the tool loops."""

from __future__ import annotations

from pathlib import Path

from cluster.config import find_demo_model
from deploy.models.tokenizer import TOOL_TEMPLATE

_TEMPLATE = "chat_template.jinja"


def supports_tools(folder: Path) -> bool:
    """Whether the checkpoint's own chat template renders tools."""
    return "tools" in (folder / _TEMPLATE).read_text()


def model_with_tools(model: str | None, directory: Path) -> Path:
    """A checkpoint whose chat template renders tools.

    Args:
        model: checkpoint folder; None for the demo model.
        directory: empty folder; gets a copy of the checkpoint with the demo model's tool template
            if the model's own template does not support tools.
    """
    folder = Path(model or find_demo_model())
    if supports_tools(folder):
        return folder
    for path in folder.iterdir():
        (directory / path.name).symlink_to(path.resolve())
    (directory / _TEMPLATE).unlink(missing_ok=True)
    (directory / _TEMPLATE).write_text(TOOL_TEMPLATE)
    return directory
