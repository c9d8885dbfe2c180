"""`rayfleet top`: live view of a fleet's models and workers, from its metrics."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import sys
import termios
import time
import tty
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from cluster.cli.endpoint import Endpoint, EndpointOptions
from cluster.cli.fleet_rates import (
    AdapterRow,
    ModelRow,
    Scrape,
    SessionRow,
    WorkerRow,
    adapter_rows,
    model_rows,
    session_rows,
    sparkline,
    worker_rows,
)
from cluster.cli.options import add_options, given_options

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

Row = TypeVar("Row", ModelRow, WorkerRow)

SCRAPE_TIMEOUT_S = 10.0
"""Timeout in seconds of a scrape."""
HISTORY = 30
"""Number of scrapes in a sparkline."""
_FLAG = {"argparse": {"action": "store_true"}}
MODEL_HEADS = ("MODEL", "WORKERS", "PENDING", "REQ/S", "TOK/S", "TTFT-P50", "P95", "SLO-MET")
WORKER_HEADS = (
    *("MODEL", "WORKER", "RUN", "WAIT", "KV", "HOST", "LORA", "HIT", "TOK/S", "TTFT-P50"),
    "PREEMPTED",
)
ADAPTER_HEADS = ("MODEL", "ADAPTER", "DEVICE", "HOST", "REQ/S", "TOK/S", "TTFT-MEAN")
SESSION_HEADS = ("MODEL", "SESSIONS", "WAITING", "LONGEST-WAIT", "KV")


@dataclass(frozen=True, kw_only=True, slots=True)
class TopOptions(EndpointOptions):
    """Options of `top`: URLs of metrics, interval, and output format."""

    metrics_url: tuple[str, ...] = ()
    """URL of another node's --metrics-port, such as http://node:9464; may be repeated. The
    endpoint itself only has the metrics of the node whose gateway handles the request."""
    interval_s: float = 1.0
    """Interval between scrapes in seconds; rates are averages over this interval."""
    once: bool = field(default=False, metadata=_FLAG)
    """Scrape twice, print plain text and exit; the default if the output is not a terminal."""
    json: bool = field(default=False, metadata=_FLAG)
    """Like --once, but print JSON."""

    def __post_init__(self) -> None:
        EndpointOptions.__post_init__(self)
        if not self.interval_s > 0.0:
            raise ValueError(f"--interval-s must be greater than 0, got {self.interval_s}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `rayfleet top` to its parser."""
    parser.description = "Live view of a fleet's models and workers; press q or Ctrl-C to quit."
    add_options(parser, TopOptions)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Shows the fleet once, or until q or Ctrl-C is pressed; returns the exit code."""
    options = TopOptions(**given_options(arguments, TopOptions))
    fleet = FleetWatch(options)
    if options.once or options.json or not sys.stdout.isatty():
        fleet.scrape()
        time.sleep(options.interval_s)
        fleet.scrape()
        print(_as_json(fleet) if options.json else _as_text(fleet))
        return 0
    with contextlib.suppress(KeyboardInterrupt):
        _show(fleet, options.interval_s)
    return 0


class FleetWatch:
    """State of a fleet, updated by scrapes of its metrics.

    Args:
        options: URLs and API key.
    """

    def __init__(self, options: TopOptions) -> None:
        # A --metrics-port requires no key, so none is sent.
        self._endpoints = [
            Endpoint(options.url, options.key, SCRAPE_TIMEOUT_S),
            *(
                Endpoint(url.removesuffix("/metrics"), timeout_s=SCRAPE_TIMEOUT_S)
                for url in options.metrics_url
            ),
        ]
        self.models: list[ModelRow] = []
        """Rows of models as of the last scrape."""
        self.workers: list[WorkerRow] = []
        """Rows of workers as of the last scrape."""
        self.adapters: list[AdapterRow] = []
        """Rows of LoRA adapters that have had requests or are loaded on workers, as of the last
        scrape."""
        self.sessions: list[SessionRow] = []
        """Rows of models with a session gate, as of the last scrape; empty if the API key is not
        allowed to list sessions."""
        self.rates: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=HISTORY))
        """Tokens per second at the most recent scrapes, oldest first, by worker."""
        self._before: Scrape | None = None

    def scrape(self) -> None:
        """Scrapes all nodes. Raises ValueError if a node does not respond."""
        texts = [endpoint.text("/metrics") for endpoint in self._endpoints]
        self.update(Scrape(time.monotonic(), texts))
        try:
            self.sessions = session_rows(self._endpoints[0].get("/sessions"))
        except ValueError:  # without the monitoring permission
            self.sessions = []

    def update(self, now: Scrape) -> None:
        """Updates all rows from a scrape and the previous one.

        Latencies and ratios of an interval without requests keep their last values; at the first
        scrape, they cover the time since each process started.
        """
        began = now.beginning()
        known = {row.model: row for row in [*model_rows(began, now), *self.models]}
        self.models = [
            _with_last_known(row, known[row.model], "ttft_p50_ms", "ttft_p95_ms", "slo_attainment")
            for row in model_rows(self._before, now)
        ]
        known_workers = {row.worker: row for row in [*worker_rows(began, now), *self.workers]}
        self.workers = [
            _with_last_known(row, known_workers[row.worker], "ttft_ms", "hit_rate")
            for row in worker_rows(self._before, now)
        ]
        self.adapters = adapter_rows(self._before, now)
        if self._before is not None:
            for row in self.workers:
                self.rates[row.worker].append(row.tokens_per_s)
        self._before = now


def _with_last_known(row: Row, known: Row, *names: str) -> Row:
    """`row` with values of `known` for fields that are None."""
    return replace(row, **{n: getattr(known, n) for n in names if getattr(row, n) is None})


def model_cells(row: ModelRow) -> tuple[str, ...]:
    """Cells of a model's row, in the order of MODEL_HEADS."""
    return (
        row.model,
        f"{row.workers_ready}/{row.workers_wanted}",
        str(row.pending),
        f"{row.requests_per_s:.1f}",
        f"{row.tokens_per_s:.0f}",
        _milliseconds(row.ttft_p50_ms),
        _milliseconds(row.ttft_p95_ms),
        _percent(row.slo_attainment),
    )


def worker_cells(row: WorkerRow) -> tuple[str, ...]:
    """Cells of a worker's row, in the order of WORKER_HEADS."""
    return (
        row.model,
        row.worker if row.ready else f"{row.worker} (loading)",
        str(row.running),
        str(row.waiting),
        _percent(row.kv_usage),
        _percent(row.host_usage),
        f"{row.adapters}/{row.adapter_slots}" if row.adapter_slots else "-",
        _percent(row.hit_rate),
        f"{row.tokens_per_s:.0f}",
        _milliseconds(row.ttft_ms),
        str(row.preemptions),
    )


def adapter_cells(row: AdapterRow) -> tuple[str, ...]:
    """Cells of a LoRA adapter's row, in the order of ADAPTER_HEADS."""
    places = (str(len(row.on_device)), str(len(row.on_host)))
    rates = (f"{row.requests_per_s:.1f}", f"{row.tokens_per_s:.0f}")
    return (row.model, row.adapter, *places, *rates, _milliseconds(row.ttft_ms))


def session_cells(row: SessionRow) -> tuple[str, ...]:
    """Cells of a model's agent sessions, in the order of SESSION_HEADS."""
    wait = "-" if row.longest_wait_s is None else f"{row.longest_wait_s:.0f}s"
    return (row.model, str(row.live), str(row.waiting), wait, _percent(row.cache_share))


def page(fleet: FleetWatch) -> Group:
    """Tables of models, workers, LoRA adapters and agent sessions for a terminal."""
    from rich.console import Group

    models = _table(MODEL_HEADS, [model_cells(row) for row in fleet.models])
    workers = _table(
        (*WORKER_HEADS, "TOK/S-HISTORY"),
        [(*worker_cells(row), sparkline(fleet.rates[row.worker])) for row in fleet.workers],
        left=2,
    )
    tables = [models, workers]
    if fleet.adapters:
        tables.append(_table(ADAPTER_HEADS, [adapter_cells(r) for r in fleet.adapters], left=2))
    if fleet.sessions:
        tables.append(_table(SESSION_HEADS, [session_cells(row) for row in fleet.sessions]))
    return Group(*tables)


def _show(fleet: FleetWatch, interval_s: float) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    fleet.scrape()  # before the alternate screen, so that its error stays visible
    with Live(console=Console(), screen=True, auto_refresh=False) as live, single_keys():
        shown: Group | Text = page(fleet)
        while True:
            live.update(shown, refresh=True)
            if quits_within(interval_s):
                return
            try:
                fleet.scrape()
                shown = page(fleet)
            except ValueError as error:  # a gateway that is being replaced will be back
                shown = Text(f"{error}\n(retrying; q quits)")


@contextlib.contextmanager
def single_keys() -> Iterator[None]:
    """Context manager in which the terminal delivers single keys without echo, if stdin is a
    terminal."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def quits_within(seconds: float) -> bool:
    """Waits for a time in seconds; returns True early if q is pressed."""
    deadline = time.monotonic() + seconds
    if not sys.stdin.isatty():
        time.sleep(seconds)
        return False
    while (left := deadline - time.monotonic()) > 0.0:
        if select.select([sys.stdin], [], [], left)[0]:
            keys = os.read(sys.stdin.fileno(), 64)
            if not keys or b"q" in keys.lower():  # empty: the terminal was closed
                return True
    return False


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for number, head in enumerate(heads):
        table.add_column(head, justify="left" if number < left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))  # names are not markup
    return table


def _as_text(fleet: FleetWatch) -> str:
    models = [MODEL_HEADS, *map(model_cells, fleet.models)]
    workers = [WORKER_HEADS, *map(worker_cells, fleet.workers)]
    tables = [models, workers]
    if fleet.adapters:
        tables.append([ADAPTER_HEADS, *map(adapter_cells, fleet.adapters)])
    if fleet.sessions:
        tables.append([SESSION_HEADS, *map(session_cells, fleet.sessions)])
    return "\n\n".join(map(_aligned, tables))


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    """Lines with aligned columns; spaces in cells become dashes, for `awk`."""
    cells = [[cell.replace(" ", "-") for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    )


def _as_json(fleet: FleetWatch) -> str:
    return json.dumps(
        {
            "models": [asdict(row) for row in fleet.models],
            "workers": [asdict(row) for row in fleet.workers],
            "adapters": [asdict(row) for row in fleet.adapters],
            "sessions": [asdict(row) for row in fleet.sessions],
        }
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}ms" if value < 1e4 else f"{value / 1e3:.1f}s"
