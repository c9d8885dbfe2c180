"""Garbage collection in processes that must not pause."""

from __future__ import annotations

import gc

_THRESHOLDS = (10_000, 20, 50)
"""Python's own (700 to 2,000; 10; 10) suit programs that make less than 5,000 tokens per second."""


def settle_heap() -> None:
    """Once a process has started up: collections walk only what was made since, and less often.

    Libraries and tokenizers are about a million objects that live as long as the process. To walk
    them all took a busy gateway 90 to 130 ms every few seconds, in which no token left it and no
    request reached a worker.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
