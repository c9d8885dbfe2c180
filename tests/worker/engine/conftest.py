"""The tiny checkpoints of the neighbouring rooms, and the driver of engines over blocks."""

from __future__ import annotations

import sys
from pathlib import Path

for room in ("models", "diffusion"):
    sys.path.insert(0, str(Path(__file__).parents[1] / room))
