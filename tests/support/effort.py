"""Number of random cases of a test: a part in `make test`, all of them in `make check-long`."""

from __future__ import annotations

import os

IS_LONG = os.environ.get("TEST_EFFORT") == "long"
SHORTER = 5


def cases(number: int, shorter: int = SHORTER) -> int:
    """Number of cases to generate: `number`, or one of `shorter` in `make test`.

    Tests of modules that use this function are marked `randomized`, as those of hypothesis are, so
    that `make check-long` runs them again.
    """
    return number if IS_LONG else number // shorter


def is_thorough(device: str) -> bool:
    """Whether a kernel's case runs all variants: on a GPU, and in `make check-long`. In `make test`
    the interpreter, whose programs take milliseconds, runs one of each code path."""
    return IS_LONG or device != "cpu"
