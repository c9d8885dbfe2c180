"""Draws how much longer each contender's requests wait than the best one's, by workload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

try:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
except ImportError as error:
    raise ValueError("--plot needs matplotlib: pip install 'rayfleet[plots]'") from error


def draw_ratios(rows: Sequence[Mapping[str, Any]], own: str, path: str) -> None:
    """Writes a PNG: mean and p99 of the time to the first token over the best one's, log scale."""
    names = list(dict.fromkeys(row["workload"] for row in rows))
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    figure, panels = pyplot.subplots(2, 1, figsize=(14, 9), sharex=True, layout="constrained")
    for axes, value in zip(panels, ("mean_ttft_s", "p99_ttft_s"), strict=True):
        cells = {(row["workload"], row["policy"]): row[value] for row in rows}
        width = 0.85 / len(policies)
        for place, policy in enumerate(policies):
            best = [min(cells[name, other] for other in policies) for name in names]
            ratios = [cells[name, policy] / low for name, low in zip(names, best, strict=True)]
            lefts = [number + place * width for number in range(len(names))]
            color = "black" if policy == own else f"C{place}"
            axes.bar(lefts, ratios, width, bottom=0.0, color=color, label=policy)
        axes.set_yscale("log")
        axes.set_ylim(bottom=0.9)
        axes.set_ylabel(f"{value} over the best")
    panels[-1].set_xticks(
        [number + 0.4 for number in range(len(names))], names, rotation=30, ha="right"
    )
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=5)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
