"""Draws step timelines: a lane for the coordinator and one for rank 0, at each depth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from worker.core.timeline import StepRecord

try:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch
except ImportError as error:
    raise ValueError("--plot needs matplotlib: pip install 'rayfleet[plots]'") from error

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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


def draw_timelines(depths: Sequence[Sequence[StepRecord]], path: str) -> None:
    """Writes a PNG with one panel per depth, all on the same scale of time."""
    figure, panels = pyplot.subplots(
        len(depths), 1, figsize=(14, 2.2 * len(depths)), sharex=True, layout="constrained"
    )
    for depth, (axes, records) in enumerate(zip(panels, depths, strict=True)):
        _draw(axes, records)
        axes.set_title(f"overlap depth {depth}", loc="left", fontsize=10)
    panels[-1].set_xlabel("milliseconds")
    handles = [Patch(color=color) for color in _COLORS.values()]
    figure.legend(handles, list(_COLORS), loc="outside lower center", ncols=len(_COLORS))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw(axes: Axes, records: Sequence[StepRecord]) -> None:
    # Neighbours overlap in what they wait for: the first one drawn begins the picture.
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
