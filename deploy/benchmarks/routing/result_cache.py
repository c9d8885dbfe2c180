"""File cache of simulation results, so that a long comparison can be resumed."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import deploy.benchmarks.routing as routing_package
import router.config as config_module
import router.fleet as fleet_package
import worker.core.cache as cache_package
import worker.core.scheduler as scheduler_package
import worker.protocol as wire_package
from deploy.benchmarks.routing.figures import Figures

_SIMULATED = (routing_package, cache_package, scheduler_package, wire_package)


class ResultCache:
    """Metrics of simulations, in a JSON Lines file. The key contains a digest of the code, so
    metrics of other versions of the code are not used.

    Args:
        path: path of the file, which is created if missing; empty disables the file.

    Raises:
        ValueError: the file has a different format.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._known: dict[str, list[float]] = {}
        if not path or not os.path.exists(path):
            return
        try:
            lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
            self._known = {line["run"]: line["figures"] for line in lines}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"--resume {path} is not a file of simulation results: use another path"
            ) from error

    def take(self, run: Mapping[str, Any], simulate: Callable[[], Figures]) -> Figures:
        """Metrics of the simulation described by `run`: from the file if it has them, otherwise
        from `simulate`.

        Args:
            run: workload, router, settings, seed, scale and digest of the code.
            simulate: runs the simulation.
        """
        key = json.dumps(run, sort_keys=True)
        known = self._known.get(key)
        if known is not None:
            return Figures(*known)
        found = simulate()
        if self._path:
            with open(self._path, "a") as file:
                file.write(json.dumps({"run": key, "figures": found}) + "\n")
        return found


def simulation_digest() -> str:
    """Digest of the code of the simulation and the simulated workers."""
    return _digest(_sources(_SIMULATED))


def routing_digest() -> str:
    """Digest of the code of the simulation, the simulated workers, the gateway's routing and its
    options."""
    settings = Path(str(config_module.__file__))
    return _digest([*_sources((*_SIMULATED, fleet_package)), settings])


def _sources(packages: Sequence[ModuleType]) -> list[Path]:
    folders = [folder for package in packages for folder in package.__path__]
    return [path for folder in folders for path in sorted(Path(folder).glob("*.py"))]


def _digest(paths: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
