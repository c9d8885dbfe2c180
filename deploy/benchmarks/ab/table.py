"""Tables of the comparisons in `deploy/benchmarks/README.md`.

`python -m deploy.benchmarks.ab.table` updates them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from deploy.benchmarks.ab.presets import PRESETS, Preset
from worker.protocol.diffusion import DllmFeature

README = Path(__file__).resolve().parents[1] / "README.md"
START, END = "<!-- generated: presets -->\n", "<!-- end of presets -->\n"


def table() -> str:
    """Markdown tables of all presets and of their variants."""
    presets = [
        f"| `{name}` | {preset.measures} | {_goals(preset)} |\n" for name, preset in PRESETS.items()
    ]
    variants = [
        f"|{'' if number else f' `{name}`'} | {variant} | {_differences(options)} |\n"
        for name, preset in PRESETS.items()
        for number, (variant, options) in enumerate(preset.variants.items())
    ]
    return (
        "| comparison | measures | goals |\n|---|---|---|\n"
        + "".join(presets)
        + "\n| comparison | variant | engine options of the variant |\n|---|---|---|\n"
        + "".join(variants)
    )


def with_table(text: str) -> str:
    """`text` with the current tables between START and END."""
    before, _, rest = text.partition(START)
    return before + START + table() + END + rest.partition(END)[2]


def _differences(options: Mapping[str, Any]) -> str:
    found = ", ".join(f"`{name}` {_value(value)}" for name, value in options.items())
    return found or "none"


def _value(value: object) -> str:
    if isinstance(value, tuple):
        rest = [name for name in get_args(DllmFeature) if name not in value]
        return f"all but ({', '.join(rest)})" if value and rest else ", ".join(value) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value) or "none"


def _goals(preset: Preset) -> str:
    signs = {"<=": "≤", ">=": "≥"}
    return ", ".join(f"`{g.figure}` {signs[g.bound]} {g.limit:g}" for g in preset.goals)


if __name__ == "__main__":
    README.write_text(with_table(README.read_text()))
