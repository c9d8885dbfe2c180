"""Charts of a job's report, as inline SVG."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INCHES = (6.0, 3.2)
_LIMIT: dict[str, Any] = {"color": "#b00020", "linestyle": "--"}
_MAX_MARKERS = 24
"""Maximum number of points of a line with markers."""
_FAR = 2.0
"""Maximum SLO limit to which the x axis of a histogram is extended, as a multiple of the upper edge
of its last bin."""
_NO_PLOTS = "<p>Charts need matplotlib: pip install 'rayfleet[plots]'</p>"

Series = Mapping[str, Sequence[tuple[float, float]]]
"""Points of each line, by the line's name."""


def line_chart(
    title: str,
    x_label: str,
    y_label: str,
    series: Series,
    *,
    log: bool = False,
    whole: bool = False,
    limit: float | None = None,
) -> str:
    """Line chart as HTML.

    Args:
        title: caption.
        x_label: label of the x axis, which starts at 0.
        y_label: label of the y axis, which starts at 0 unless it is logarithmic.
        series: points of each line.
        log: whether the y axis is logarithmic.
        whole: whether the y axis has integer ticks.
        limit: value on the y axis to mark as the SLO; None if there is none.
    """
    lines = {
        name: sorted(p for p in points if math.isfinite(p[1]) and (p[1] > 0.0 or not log))
        for name, points in series.items()
    }

    def draw(axes: Axes) -> None:
        for name, line in lines.items():
            if not line:
                continue
            marker = "o" if len(line) <= _MAX_MARKERS else ""
            axes.plot(*zip(*line, strict=True), marker=marker, ms=3, label=name)
        if limit:
            axes.axhline(limit, label=f"SLO {limit:,.4g}", **_LIMIT)
        axes.set(xlabel=x_label, ylabel=y_label, xlim=(0.0, None))
        axes.set_yscale("log" if log else "linear")
        if not log:
            axes.set_ylim(bottom=0.0)
            axes.locator_params(axis="y", integer=whole)
        if limit or len(lines) > 1:
            axes.legend()

    return _figure(title, draw if any(lines.values()) else None)


def bar_chart(
    title: str,
    x_label: str,
    y_label: str,
    bars: Sequence[tuple[float, float]],
    *,
    limit: float | None = None,
) -> str:
    """Histogram as HTML.

    Args:
        title: caption.
        x_label: label of the x axis.
        y_label: label of the y axis.
        bars: left edge and count of each bar, all of equal width.
        limit: value on the x axis to mark as the SLO; None if there is none. A limit far beyond all
            bars is only shown in the legend, as it would make the bars too thin.
    """

    def draw(axes: Axes) -> None:
        lefts, heights = zip(*bars, strict=True)
        width = lefts[1] - lefts[0]
        axes.bar(lefts, heights, width, align="edge")
        if limit is not None and limit <= _FAR * (lefts[-1] + width):
            axes.axvline(limit, label=f"SLO {limit:,.4g}", **_LIMIT)
        elif limit is not None:
            axes.plot([], [], label=f"SLO {limit:,.4g}, beyond the axis", **_LIMIT)
        axes.set(xlabel=x_label, ylabel=y_label, xlim=(0.0, None))
        axes.locator_params(axis="y", integer=True)
        if limit is not None:
            axes.legend()

    return _figure(title, draw if len(bars) > 1 else None)


def _figure(title: str, draw: Callable[[Axes], None] | None) -> str:
    """The chart with its caption, or the text "no data" if `draw` is None."""
    body = "<p>no data</p>" if draw is None else _svg(draw)
    return f"<figure><figcaption>{escape(title)}</figcaption>{body}</figure>"


def _svg(draw: Callable[[Axes], None]) -> str:
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        return _NO_PLOTS
    with rc_context({"svg.fonttype": "none", "font.size": 9.0}):  # searchable text
        figure = Figure(figsize=_INCHES, layout="constrained")
        axes = figure.add_subplot()
        axes.grid(axis="y", color="#ddd")
        axes.set_axisbelow(True)
        draw(axes)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    return text[text.index("<svg") :]
