"""Charts as SVG, for pages that load nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

_WIDTH, _HEIGHT = 560, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 34, 44
_COLORS = ("#1f5fa8", "#c4501b", "#2c8a4b", "#7a4aa0", "#8a6d1f")
_LIMIT = "#b00020"
_DASHED = "stroke-dasharray='6 4'"
_FEW_POINTS = 24
"""Up to so many get a dot each."""
_FAR = 2.0
"""Times the greatest value, up to which an axis goes on to its limit."""
_STEPS = 8
"""Most of an even axis."""
_FINE = 9
"""Ticks that fit beside an axis of powers."""
_NO_DATA = f"<text x='{_WIDTH / 2}' y='{_HEIGHT / 2}' text-anchor='middle'>no data</text>"

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
    shown = {
        name: [p for p in points if math.isfinite(p[1]) and (p[1] > 0.0 or not log)]
        for name, points in series.items()
    }
    points = [point for line in shown.values() for point in line]
    if not points:
        return _frame(title, x_label, y_label, [_NO_DATA])
    levels = [y for _, y in points] + ([limit] if limit else [])
    axes = _Axes([x for x, _ in points], levels, log=log, whole=whole)
    parts = axes.grid()
    for place, (name, line) in enumerate(shown.items()):
        color = _COLORS[place % len(_COLORS)]
        path = " ".join(f"{axes.x(x):.1f},{axes.y(y):.1f}" for x, y in sorted(line))
        parts.append(f"<polyline points='{path}' fill='none' stroke='{color}' stroke-width='2'/>")
        if len(line) <= _FEW_POINTS:
            parts += [
                f"<circle cx='{axes.x(x):.1f}' cy='{axes.y(y):.1f}' r='3' fill='{color}'/>"
                for x, y in line
            ]
        if len(shown) > 1:
            parts.append(_legend(place, name, color))
    if limit:
        y = axes.y(limit)
        parts.append(
            f"<line x1='{_LEFT}' x2='{_WIDTH - _RIGHT}' y1='{y:.1f}' y2='{y:.1f}' "
            f"stroke='{_LIMIT}' {_DASHED}/>"
        )
        place = len(shown) if len(shown) > 1 else 0
        parts.append(_legend(place, f"SLO {_number(limit)}", _LIMIT, _DASHED))
    return _frame(title, x_label, y_label, parts)


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
    if len(bars) < 2:
        return _frame(title, x_label, y_label, [_NO_DATA])
    step = bars[1][0] - bars[0][0]
    edges = [left for left, _ in bars] + [bars[-1][0] + step]
    near = limit is not None and limit <= _FAR * edges[-1]
    if limit is not None and near:
        edges.append(limit)
    axes = _Axes(edges, [height for _, height in bars], whole=True)
    parts = axes.grid()
    for left, height in bars:
        x, y = axes.x(left), axes.y(height)
        width = max(axes.x(left + step) - x - 1.0, 0.5)
        parts.append(
            f"<rect x='{x:.1f}' y='{y:.1f}' width='{width:.1f}' "
            f"height='{axes.y(0.0) - y:.1f}' fill='{_COLORS[0]}'/>"
        )
    if limit is not None:
        if near:
            x = axes.x(limit)
            parts.append(
                f"<line x1='{x:.1f}' x2='{x:.1f}' y1='{_TOP}' y2='{_HEIGHT - _BOTTOM}' "
                f"stroke='{_LIMIT}' {_DASHED}/>"
            )
        far = "" if near else ", beyond the axis"
        parts.append(_legend(0, f"SLO {_number(limit)}{far}", _LIMIT, _DASHED))
    return _frame(title, x_label, y_label, parts)


class _Axes:
    """Where values lie on the chart."""

    def __init__(
        self, xs: Sequence[float], ys: Sequence[float], *, log: bool = False, whole: bool = False
    ) -> None:
        self._log = log
        self._right = max(xs) or 1.0
        self._x_ticks = _even_ticks(self._right)
        self._y_ticks = _power_ticks(min(ys), max(ys)) if log else _even_ticks(max(ys), whole=whole)

    def x(self, value: float) -> float:
        return _LEFT + value / self._right * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self._level(self._y_ticks[0]), self._level(self._y_ticks[-1])
        part = (self._level(value) - low) / (high - low)
        return _HEIGHT - _BOTTOM - part * (_HEIGHT - _TOP - _BOTTOM)

    def grid(self) -> list[str]:
        """Lines and numbers."""
        parts = []
        for value in self._y_ticks:
            y = self.y(value)
            parts.append(
                f"<line x1='{_LEFT}' x2='{_WIDTH - _RIGHT}' y1='{y:.1f}' y2='{y:.1f}' "
                f"stroke='#ddd'/><text x='{_LEFT - 6}' y='{y + 4:.1f}' "
                f"text-anchor='end'>{_number(value)}</text>"
            )
        for value in self._x_ticks:
            if value <= self._right:
                parts.append(
                    f"<text x='{self.x(value):.1f}' y='{_HEIGHT - _BOTTOM + 16}' "
                    f"text-anchor='middle'>{_number(value)}</text>"
                )
        return parts

    def _level(self, value: float) -> float:
        return math.log10(value) if self._log else value


def _even_ticks(high: float, *, whole: bool = False) -> list[float]:
    """From 0 to at least `high`, a few round steps."""
    high = high or 1.0
    step = _round_up(high / _STEPS)
    if whole:
        step = max(step, 1.0)
    return [step * place for place in range(math.ceil(high / step - 1e-9) + 1)]


def _power_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten around `low` to `high`; the powers alone where it is far."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    fine = [digit * 10.0**power for power in range(first, last + 1) for digit in (1.0, 2.0, 5.0)]
    begin = max(place for place, value in enumerate(fine) if value <= low * (1 + 1e-9))
    end = min(place for place, value in enumerate(fine) if value >= high * (1 - 1e-9))
    ticks = fine[begin : max(end, begin + 1) + 1]
    if len(ticks) <= _FINE:
        return ticks
    return [10.0**power for power in range(first, last + 1)]


def _round_up(value: float) -> float:
    """The next of 1, 2 and 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(digit * power for digit in (1.0, 2.0, 5.0, 10.0) if digit * power >= value * 0.999)


def _legend(place: int, name: str, color: str, style: str = "") -> str:
    x = _LEFT + 8 + 90 * place
    return (
        f"<line x1='{x}' x2='{x + 18}' y1='{_TOP - 14}' y2='{_TOP - 14}' stroke='{color}' "
        f"stroke-width='2' {style}/><text x='{x + 24}' y='{_TOP - 10}'>{escape(name)}</text>"
    )


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
