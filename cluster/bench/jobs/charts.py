"""Charts of a report: SVG within the page, which loads nothing."""

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
_FEW_POINTS = 24
"""Up to so many get a dot each."""
_FAR = 2.0
"""Times the greatest value, up to which an axis goes on to its limit."""
_NO_PLOTS = "<p>Charts need matplotlib: pip install 'rayfleet[plots]'</p>"

Series = Mapping[str, Sequence[tuple[float, float]]]
"""Points by the name of their line."""


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
    """Lines through points.

    Args:
        title: above the chart.
        x_label: below it.
        y_label: beside it.
        series: the lines; axes begin at 0.
        log: scales the upright axis by powers, which has no 0.
        whole: no fractions on that axis.
        limit: a level that is marked as the SLO.
    """
    lines = {
        name: sorted(p for p in points if math.isfinite(p[1]) and (p[1] > 0.0 or not log))
        for name, points in series.items()
    }

    def draw(axes: Axes) -> None:
        for name, line in lines.items():
            if not line:
                continue
            marker = "o" if len(line) <= _FEW_POINTS else ""
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
    """A histogram: (left edge, count) of bars of equal width.

    `limit` is marked as the SLO; one that is far from all bars is only told, lest they get thin.
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
    """The chart with its title; without `draw` there is no data for it."""
    body = "<p>no data</p>" if draw is None else _svg(draw)
    return f"<figure><figcaption>{escape(title)}</figcaption>{body}</figure>"


def _svg(draw: Callable[[Axes], None]) -> str:
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        return _NO_PLOTS
    with rc_context({"svg.fonttype": "none", "font.size": 9.0}):  # text that can be searched
        figure = Figure(figsize=_INCHES, layout="constrained")
        axes = figure.add_subplot()
        axes.grid(axis="y", color="#ddd")
        axes.set_axisbelow(True)
        draw(axes)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    return text[text.index("<svg") :]
