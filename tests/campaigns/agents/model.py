"""The checkpoint that clients with tools are tried on."""

from __future__ import annotations

from pathlib import Path

from cluster.config import find_demo_model
from deploy.models.tokenizer import TOOL_TEMPLATE

_TEMPLATE = "chat_template.jinja"


def supports_tools(folder: Path) -> bool:
    """Whether the checkpoint's own chat template shows functions to the model."""
    return "tools" in (folder / _TEMPLATE).read_text()


def model_with_tools(model: str | None, directory: Path) -> Path:
    """A checkpoint whose chat template shows functions.

    Args:
        model: checkpoint folder; the demo model where there is none.
        directory: empty; it becomes the checkpoint with the demo's template for functions, where
            the model's own template shows none.
    """
    folder = Path(model or find_demo_model())
    if supports_tools(folder):
        return folder
    for path in folder.iterdir():
        (directory / path.name).symlink_to(path.resolve())
    (directory / _TEMPLATE).unlink(missing_ok=True)
    (directory / _TEMPLATE).write_text(TOOL_TEMPLATE)
    return directory
