"""Plots of benchmarks as PNG; requires the extra `plots`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

try:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch
except ImportError as error:
    raise ValueError("--plot needs matplotlib: pip install 'rayfleet[plots]'") from error

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from deploy.benchmarks.scenarios.turn import Turn
    from worker.core.timeline import StepRecord

_COLORS = {
    "schedule": "#3b6fb6",
    "broadcast": "#7fb0e0",
    "process": "#1f3f6d",
    "collect (waits)": "#e4e4e4",
    "prepare": "#e0a030",
    "forward": "#3f9a5a",
    "sample": "#8fcf9f",
    "bubble": "#d04545",
}
_LANES = ("rank 0", "coordinator")


def draw_bars(
    rows: Sequence[Mapping[str, Any]],
    key: str,
    panels: Mapping[str, tuple[str, bool]],
    path: str,
    own: str | None = None,
) -> None:
    """Writes a PNG bar chart by workload, with one panel per metric.

    Args:
        rows: one row for each `workload` and value of `key`.
        key: name of the column whose values are compared.
        panels: label of each metric, and whether its scale is logarithmic, keyed by column.
        path: path of the file.
        own: value of `key` that is plotted in black.
    """
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    names = list(dict.fromkeys(row[key] for row in rows))
    width = 0.85 / len(names)
    figure, all_axes = pyplot.subplots(
        len(panels), 1, figsize=(14, 9), sharex=True, layout="constrained", squeeze=False
    )
    for axes, (value, (label, is_log)) in zip(all_axes[:, 0], panels.items(), strict=True):
        cells = {(row["workload"], row[key]): row[value] for row in rows}
        for place, name in enumerate(names):
            lefts = [number + place * width for number in range(len(workloads))]
            heights = [cells[workload, name] for workload in workloads]
            color = "black" if name == own else f"C{place}"
            axes.bar(lefts, heights, width, color=color, label=name)
        axes.set_ylabel(label)
        if is_log:
            axes.set_yscale("log")
    ticks = [number + 0.4 for number in range(len(workloads))]
    all_axes[-1, 0].set_xticks(ticks, workloads, rotation=30, ha="right")
    figure.legend(*all_axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=5)
    _save(figure, path)


def draw_turns(title: str, turns: Mapping[str, Turn], path: str) -> None:
    """Writes a PNG of one run per fleet: times to first token, their distribution, and queue
    lengths."""
    figure, (times, shares, queues) = pyplot.subplots(3, 1, figsize=(10, 9), layout="constrained")
    for name, turn in turns.items():
        done = [
            (planned.arrival_s, 1e3 * record.ttft)
            for planned, record in zip(turn.planned, turn.records, strict=True)
            if not record.error
        ]
        values = sorted(ttft for _, ttft in done)
        times.plot([at for at, _ in done], [ttft for _, ttft in done], ".", ms=3, label=name)
        shares.plot(values, [(place + 1) / len(values) for place in range(len(values))], label=name)
        queues.plot(
            [m.at_s for m in turn.moments], [m.num_waiting for m in turn.moments], label=name
        )
    times.set(xlabel="arrival, s", ylabel="TTFT, ms", title=title)
    shares.set(xlabel="TTFT, ms", ylabel="part of the requests", xscale="log")
    queues.set(xlabel="seconds", ylabel="requests that wait")
    times.legend()
    _save(figure, path)


def draw_timelines(depths: Sequence[Sequence[StepRecord]], path: str) -> None:
    """Writes a PNG of step timelines, with one panel per overlap depth and a common time scale."""
    figure, panels = pyplot.subplots(
        len(depths), 1, figsize=(14, 2.2 * len(depths)), sharex=True, layout="constrained"
    )
    for depth, (axes, records) in enumerate(zip(panels, depths, strict=True)):
        _draw_steps(axes, records)
        axes.set_title(f"overlap depth {depth}", loc="left", fontsize=10)
    panels[-1].set_xlabel("milliseconds")
    handles = [Patch(color=color) for color in _COLORS.values()]
    figure.legend(handles, list(_COLORS), loc="outside lower center", ncols=len(_COLORS))
    _save(figure, path)


def _draw_steps(axes: Axes, records: Sequence[StepRecord]) -> None:
    # Phases of neighboring steps overlap: the origin is the start of the first step on rank 0.
    origin = min(record.rank.started for record in records)
    for record in records:
        for lane, phase, start, end in _spans(record):
            left, width = (start - origin) * 1e3, (end - start) * 1e3
            axes.barh(lane, width, left=left, color=_COLORS[phase], height=0.7)
        middle = (record.rank.started + record.rank.finished) / 2 - origin
        axes.text(middle * 1e3, 0, str(record.seq), ha="center", va="center", fontsize=8)
    axes.set_yticks(range(len(_LANES)), _LANES)


def _spans(record: StepRecord) -> Iterator[tuple[int, str, float, float]]:
    rank = record.rank
    yield 0, "bubble", rank.started - record.bubble, rank.started
    yield 0, "prepare", rank.started, rank.prepared
    yield 0, "forward", rank.prepared, rank.forwarded
    yield 0, "sample", rank.forwarded, rank.finished
    yield 1, "schedule", record.scheduling, record.scheduled
    yield 1, "broadcast", record.scheduled, record.launched
    yield 1, "collect (waits)", record.awaited, record.collected
    yield 1, "process", record.collected, record.processed


def _save(figure: Figure, path: str) -> None:
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
