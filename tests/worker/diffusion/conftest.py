"""The engine driver and the checkpoints of the neighbouring rooms."""

from __future__ import annotations

import sys
from pathlib import Path

for room in ("models", "engine"):
    sys.path.insert(0, str(Path(__file__).parents[1] / room))
