"""Charts as SVG, for pages that load nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

_WIDTH, _HEIGHT = 560, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 34, 44
_COLORS = ("#1f5fa8", "#c4501b", "#2c8a4b", "#7a4aa0", "#8a6d1f")

Series = Mapping[str, Sequence[tuple[float, float]]]
"""Points by the name of their line."""


def line_chart(title: str, x_label: str, y_label: str, series: Series, *, log: bool = False) -> str:
    """Lines through points; `log` scales the upright axis."""
    shown = {name: [p for p in points if p[1] > 0.0 or not log] for name, points in series.items()}
    points = [point for line in shown.values() for point in line]
    if not points:
        return _frame(title, x_label, y_label, ["<text x='280' y='150'>no data</text>"])
    axes = _Axes(points, log=log)
    parts = axes.grid()
    for place, (name, line) in enumerate(shown.items()):
        color = _COLORS[place % len(_COLORS)]
        path = " ".join(f"{axes.x(x):.1f},{axes.y(y):.1f}" for x, y in sorted(line))
        parts.append(f"<polyline points='{path}' fill='none' stroke='{color}' stroke-width='2'/>")
        if len(line) <= 24:
            parts += [
                f"<circle cx='{axes.x(x):.1f}' cy='{axes.y(y):.1f}' r='3' fill='{color}'/>"
                for x, y in line
            ]
        parts.append(
            f"<text x='{_LEFT + 8 + 128 * place}' y='{_TOP - 4}' fill='{color}'>"
            f"{escape(name)}</text>"
        )
    return _frame(title, x_label, y_label, parts)


def bar_chart(title: str, x_label: str, y_label: str, bars: Sequence[tuple[float, float]]) -> str:
    """A histogram: (left edge, height) of bars of equal width."""
    if len(bars) < 2:
        return _frame(title, x_label, y_label, ["<text x='280' y='150'>no data</text>"])
    step = bars[1][0] - bars[0][0]
    axes = _Axes([*bars, (bars[-1][0] + step, 0.0)], log=False)
    parts = axes.grid()
    for left, height in bars:
        x, y = axes.x(left), axes.y(height)
        width = max(axes.x(left + step) - x - 1.0, 0.5)
        parts.append(
            f"<rect x='{x:.1f}' y='{y:.1f}' width='{width:.1f}' "
            f"height='{axes.y(0.0) - y:.1f}' fill='{_COLORS[0]}'/>"
        )
    return _frame(title, x_label, y_label, parts)


class _Axes:
    """Where values lie on the chart."""

    def __init__(self, points: Sequence[tuple[float, float]], *, log: bool) -> None:
        xs, ys = [x for x, _ in points], [y for _, y in points]
        self._log = log
        self._x0, self._x1 = min(xs), max(xs)
        low, high = min(ys), max(ys)
        self._y0 = math.floor(math.log10(low)) if log else min(low, 0.0)
        self._y1 = math.ceil(math.log10(high) + 1e-9) if log else high
        if self._x1 <= self._x0:
            self._x1 = self._x0 + 1.0
        if self._y1 <= self._y0:
            self._y1 = self._y0 + 1.0

    def x(self, value: float) -> float:
        part = (value - self._x0) / (self._x1 - self._x0)
        return _LEFT + part * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        level = math.log10(value) if self._log else value
        part = (level - self._y0) / (self._y1 - self._y0)
        return _HEIGHT - _BOTTOM - part * (_HEIGHT - _TOP - _BOTTOM)

    def grid(self) -> list[str]:
        """Lines and numbers."""
        parts = []
        for place in range(5):
            level = self._y0 + (self._y1 - self._y0) * place / 4
            value = 10.0**level if self._log else level
            y = self.y(value)
            parts.append(
                f"<line x1='{_LEFT}' x2='{_WIDTH - _RIGHT}' y1='{y:.1f}' y2='{y:.1f}' "
                f"stroke='#ddd'/><text x='{_LEFT - 6}' y='{y + 4:.1f}' "
                f"text-anchor='end'>{_number(value)}</text>"
            )
            x_value = self._x0 + (self._x1 - self._x0) * place / 4
            parts.append(
                f"<text x='{self.x(x_value):.1f}' y='{_HEIGHT - _BOTTOM + 16}' "
                f"text-anchor='middle'>{_number(x_value)}</text>"
            )
        return parts


def _frame(title: str, x_label: str, y_label: str, parts: Sequence[str]) -> str:
    middle = _TOP + (_HEIGHT - _TOP - _BOTTOM) / 2
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' role='img' aria-label='{escape(title)}'>"
        + "".join(parts)
        + f"<text x='{_WIDTH / 2}' y='{_HEIGHT - 8}' text-anchor='middle'>{escape(x_label)}</text>"
        f"<text transform='translate(14 {middle}) rotate(-90)' text-anchor='middle'>"
        f"{escape(y_label)}</text></svg></figure>"
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100.0 else f"{value:.3g}"
