"""Number of random cases per test: some in `make test`, all in `make check-long`."""

from __future__ import annotations

import os

IS_LONG = os.environ.get("TEST_EFFORT") == "long"
SHORTER = 5


def cases(number: int, shorter: int = SHORTER) -> int:
    """Number of cases to generate: `number`, or `number // shorter` in `make test`.

    Tests in modules that use this function are marked `randomized`, like hypothesis tests, so that
    `make check-long` runs them again.
    """
    return number if IS_LONG else number // shorter


def is_thorough(device: str) -> bool:
    """Whether a kernel's case runs all variants: on a GPU, and in `make check-long`. In `make
    test`, the interpreter, whose programs take milliseconds, runs one variant per code path."""
    return IS_LONG or device != "cpu"
