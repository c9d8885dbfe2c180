"""Live table that compares fleets, with one column per fleet."""

from __future__ import annotations

import math
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from cluster.bench.client import Record
from cluster.bench.console import NO_DATA
from cluster.bench.report import Result, note
from cluster.bench.stats import percentile, share
from deploy.benchmarks.scenarios.watch import Moment

_ROWS = {
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
    "ttft_p50_ms": ("TTFT p50, ms", "{:,.1f}"),
    "ttft_p99_ms": ("TTFT p99, ms", "{:,.1f}"),
    "itl_p50_ms": ("between tokens p50, ms", "{:,.2f}"),
    "itl_p99_ms": ("between tokens p99, ms", "{:,.2f}"),
    "slo_miss": ("SLO violations", "{:.1%}"),
    "hit_rate": ("KV hit rate", "{:.1%}"),
    "preemptions": ("preemptions", "{:.0f}"),
    "completed": ("completed", "{:.0f}"),
    "queue_depth": ("queue depth", "{:.1f}"),
    "workers_busy": ("workers busy", "{:.0%}"),
}


class LiveTable:
    """Table on standard error that is updated during runs; prints one line per run if standard
    error is not a terminal."""

    def __init__(self, names: tuple[str, ...], console: Console | None = None) -> None:
        self._names = names
        self._console = console or Console(stderr=True)
        self._title = ""
        self._known: dict[str, Result] = {name: {} for name in names}
        self._records: list[Record] = []
        self._live = Live(console=self._console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def begin(self, title: str) -> None:
        """Starts a run."""
        self._title = title
        self._records = []

    def record(self, record: Record) -> None:
        """Adds the record of a request that has ended."""
        self._records.append(record)

    def moment(self, name: str, moment: Moment) -> None:
        """Updates the column of the fleet under load from its metrics."""
        if not self._console.is_terminal:
            return
        done = [record for record in self._records if not record.error]
        gaps = [gap for record in done[-64:] for gap in record.itl]
        times = [record.ttft for record in done]
        self._known[name] |= {
            "completed": len(done),
            "tokens_per_second": sum(r.output_len for r in done) / max(moment.at_s, 1e-3),
            "ttft_p50_ms": 1e3 * percentile(times, 50),
            "ttft_p99_ms": 1e3 * percentile(times, 99),
            "itl_p50_ms": 1e3 * percentile(gaps, 50),
            "itl_p99_ms": 1e3 * percentile(gaps, 99),
            "hit_rate": share(sum(r.cached_tokens for r in done), sum(r.prompt_len for r in done)),
            "queue_depth": moment.num_waiting,
            "workers_busy": moment.num_busy_workers / max(1, moment.num_workers),
        }
        self._live.update(self.table(), refresh=True)

    def end(self, name: str, result: Result) -> None:
        """Ends a run. The fleet's metrics are shown until its next run."""
        self._known[name] = dict(result)
        if self._console.is_terminal:
            self._live.update(self.table(), refresh=True)
            return
        shown = {key: _cell(form, result[key]) for key, (_, form) in _ROWS.items()}
        note(
            f"{self._title}, {name}: {shown['tokens_per_second']} tokens/s, TTFT p50 "
            f"{shown['ttft_p50_ms']} p99 {shown['ttft_p99_ms']} ms, {shown['slo_miss']} late, "
            f"{shown['hit_rate']} cached, {shown['completed']} completed, {result['failed']} failed"
        )

    def table(self) -> Table:
        """Current table."""
        table = Table(title=self._title)
        table.add_column("")
        for name in self._names:
            table.add_column(name, justify="right")
        for key, (text, form) in _ROWS.items():
            cells = [
                _cell(form, known[key]) if key in known else "" for known in self._known.values()
            ]
            table.add_row(text, *cells)
        return table


def _cell(form: str, value: float) -> str:
    return form.format(value) if math.isfinite(value) else NO_DATA
