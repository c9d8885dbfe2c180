"""Public-domain passages for perplexity and long prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Final

PASSAGES: Final = tuple(
    Path(__file__).with_name("passages.txt").read_text("utf-8").removesuffix("\n").split("\n---\n")
)
"""Openings of books and speeches, and a program."""
