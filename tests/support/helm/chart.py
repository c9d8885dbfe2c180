"""The chart under test, rendered by a real Helm."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.support.paths import ROOT

CHART = ROOT / "helm" / "rayfleet"
EXAMPLES = sorted(path.name for path in CHART.glob("values*.yaml"))
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Object = dict[str, Any]


class HelmError(Exception):
    """Helm failed; the text is its error."""


@dataclass(frozen=True)
class Helm:
    """One version of the command."""

    binary: Path
    major: int

    def run(self, *arguments: str, env: dict[str, str] | None = None) -> str:
        """Output of the command.

        Raises:
            HelmError: it failed.
        """
        # Go collects garbage less often, which takes a third of the time.
        done = subprocess.run(
            [str(self.binary), *arguments],
            capture_output=True,
            text=True,
            env={"GOGC": "800", **(os.environ if env is None else env)},
            timeout=240,
        )
        if done.returncode:
            raise HelmError(done.stdout + done.stderr)
        return done.stdout

    def template(self, *arguments: str) -> list[Object]:
        """The objects of a release named `fleet`, in namespace `demo`."""
        text = self.run("template", "fleet", str(CHART), "--namespace", "demo", *arguments)
        return [document for document in yaml.load_all(text, Loader=LOADER) if document]


def only(objects: list[Object], kind: str) -> Object:
    """The only object of a kind."""
    (found,) = (o for o in objects if o["kind"] == kind)
    return found


def pod_specs(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    """Pods that the objects would create: name, and metadata with spec."""
    for o in objects:
        if o["kind"] == "Pod":
            yield o["metadata"]["name"], o
        cluster = o.get("spec", {}).get("rayClusterConfig") or o.get("spec", {}).get(
            "rayClusterSpec"
        )
        if cluster:
            yield f"{o['kind']} head", cluster["headGroupSpec"]["template"]
            for group in cluster.get("workerGroupSpecs", []):
                yield f"{o['kind']} {group['groupName']}", group["template"]
