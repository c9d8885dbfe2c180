"""Garbage collection in processes that must not pause."""

from __future__ import annotations

import gc

_THRESHOLDS = (700, 5, 500)
"""Python's are (700, 10, 10). Collections of what is young stay short and frequent. Full ones walk
all that is under way, some 230 objects per request: 120 ms beside 600 requests, every few seconds.
They are rare, since what ends here leaves nothing that only they would find; tests see to it."""


def settle_heap() -> None:
    """Once a process has started up: collections walk only what was made since, and less often.

    Libraries and tokenizers are about a million objects that live as long as the process. To walk
    them all took a busy gateway 90 to 130 ms every few seconds, in which no token left it and no
    request reached a worker.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
