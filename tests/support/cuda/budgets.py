"""Maximum launches of a captured step, by model family.

`python -m tests.support.cuda.budgets --write` counts the launches of families that are missing in
budgets.json. `--recount` counts the launches of all families, after a change that reduces them. If
a change needs more launches, give the reason. A torch operation counts as one launch, although a
sort, for example, takes several on a device.
"""

from __future__ import annotations

import json
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.cuda.counted import Counts, count_launches, write_config
from tests.support.worker.real_configs import RealConfig, accepted_model, load_corpus
from worker.models.config.families import FAMILIES

NUM_LAYERS = 6
"""Number of layers to count; enough for every kind of layer in a family."""
_FILE = Path(__file__).with_name("budgets.json")


class Budget(NamedTuple):
    """Launches per step of 4 rows."""

    model: str
    """Model whose config.json is used, from the corpus in tests/worker/models/configs."""
    layer: int
    """Launches of the layer with the most launches."""
    rest: int
    """Launches of the forward pass outside its layers: inputs, embedding, norm, and a copy for
    sampling."""
    draw: int
    """Logits, masks and sampling without filters; 0 if graphs contain no sampling."""
    filtered: int
    """Logits, masks and sampling with filters."""


BUDGETS = {
    name: Budget(**row) for name, row in json.loads(_FILE.read_text(encoding="utf-8")).items()
}
"""Budgets, keyed by architecture."""


@cache
def corpus() -> dict[str, RealConfig]:
    """Configurations of released models, keyed by name."""
    return {real.name: real for real in load_corpus()}


def count(model: str, folder: Path, num_layers: int = NUM_LAYERS, **options: Any) -> Counts:
    """Launches of a released model's captured step. The configuration is written to `folder`, which
    must be empty."""
    real = corpus()[model]
    real.write(folder)
    return count_launches(write_config(folder, dict(real.config), num_layers), **options)


def _counted(model: str) -> Budget:
    with tempfile.TemporaryDirectory() as folder:
        counts = count(model, Path(folder))
    return Budget(model, counts.layer, counts.rest, counts.draw, counts.filtered)


def main() -> None:
    """Regenerates budgets.json."""
    assert {"--write", "--recount"} & set(sys.argv), "use --write or --recount"
    budgets = {name: BUDGETS[name] for name in FAMILIES if name in BUDGETS}
    for name in FAMILIES:
        if name not in budgets or "--recount" in sys.argv:
            model = budgets[name].model if name in budgets else accepted_model(name)
            budgets[name] = _counted(model)
            print(name, budgets[name])
    rows = (
        f"{json.dumps(name)}: {json.dumps(budgets[name]._asdict())}" for name in sorted(budgets)
    )
    _FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
