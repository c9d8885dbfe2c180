"""Progress of a long startup, as a bar on a terminal, otherwise as a log line per quarter."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn

logger = logging.getLogger(__name__)


Advance = Callable[[int], None]
"""Callback that receives the amount done since the last call."""


@contextmanager
def progress(
    label: str,
    total: int,
    *,
    amount: str,
    columns: Sequence[ProgressColumn],
    show: bool,
    are_bytes: bool = False,
) -> Iterator[Advance]:
    """Shows progress on standard error while the block runs, unless `show` is False.

    Args:
        label: description such as "loading weights".
        total: total amount of work.
        amount: `total` as text, for log lines.
        columns: rich's columns to show between the bar and the elapsed time.
        show: whether to show progress.
        are_bytes: whether amounts are bytes; log lines then include the rate.
    """
    if not show:
        yield lambda _amount: None
        return
    if not sys.stderr.isatty():
        yield _LoggedProgress(label, total, amount, are_bytes)
        return
    shown = (TextColumn(label), BarColumn(), *columns, TimeElapsedColumn())
    with Progress(*shown, console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=total)
        yield lambda done: bar.advance(task, done)


class _LoggedProgress:
    """Progress that writes a log line when each quarter is done."""

    def __init__(self, label: str, total: int, amount: str, are_bytes: bool) -> None:
        self._label = label
        self._total = max(1, total)
        self._amount = amount
        self._are_bytes = are_bytes
        self._done = 0
        self._began = time.perf_counter()

    def __call__(self, amount: int) -> None:
        before = self._done * 4 // self._total
        self._done += amount
        if self._done * 4 // self._total > before:
            share = 100 * self._done // self._total
            rate = self._done / 1e9 / (time.perf_counter() - self._began)
            rate_text = f", {rate:.2f} GB/s" if self._are_bytes else ""
            logger.info("%s: %d %% of %s%s", self._label, share, self._amount, rate_text)
