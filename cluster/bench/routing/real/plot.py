"""Draws hit rates and times to first token of all routers, by workload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

try:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
except ImportError as error:
    raise ValueError("--plot needs matplotlib: pip install 'rayfleet[plots]'") from error

_PANELS = (
    ("hit_rate", "prompt tokens found in the cache", False),
    ("p50_ttft_ms", "TTFT p50, ms", True),
    ("p99_ttft_ms", "TTFT p99, ms", True),
)


def draw(rows: Sequence[Mapping[str, Any]], path: str) -> None:
    """Writes a PNG with one panel per figure."""
    names = list(dict.fromkeys(row["workload"] for row in rows))
    routers = list(dict.fromkeys(row["router"] for row in rows))
    width = 0.85 / len(routers)
    figure, panels = pyplot.subplots(len(_PANELS), 1, figsize=(10, 9), layout="constrained")
    for axes, (value, label, logarithmic) in zip(panels, _PANELS, strict=True):
        cells = {(row["workload"], row["router"]): row[value] for row in rows}
        for place, router in enumerate(routers):
            lefts = [number + place * width for number in range(len(names))]
            heights = [cells[name, router] for name in names]
            axes.bar(lefts, heights, width, color=f"C{place}", label=router)
        axes.set_ylabel(label)
        if logarithmic:
            axes.set_yscale("log")
        axes.set_xticks([number + 0.4 for number in range(len(names))], names)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
