"""Writes the Grafana dashboards: `python -m deploy.monitoring.build [FOLDER]`.

boards.py defines their content; this module writes it as Grafana's JSON model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from deploy.monitoring.boards import BOARDS
from deploy.monitoring.queries import FLEET_LABELS, Board, F, Panel

FOLDER = Path(__file__).with_name("dashboards")
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, HEIGHT = 8, 8
COLUMNS = 24 // WIDTH


def dashboard(board: Board) -> dict[str, Any]:
    """Board as Grafana's JSON model."""
    return {
        "uid": f"rayfleet-{board.name}",
        "title": f"rayfleet: {board.title}",
        "description": board.description,
        "tags": ["rayfleet"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "",
        "annotations": {"list": []},
        "links": [
            {
                "type": "dashboards",
                "title": "rayfleet",
                "tags": ["rayfleet"],
                "asDropdown": True,
                "includeVars": True,
                "keepTime": True,
            }
        ],
        "templating": {"list": [_datasource(), *_fleets(), _models()]},
        "panels": [_panel(number, panel) for number, panel in enumerate(board.panels)],
    }


def text(board: Board) -> str:
    """File content of a board."""
    return json.dumps(dashboard(board), indent=1) + "\n"


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    stacking = {"mode": "normal", "group": "A"} if panel.stacked else {"mode": "none"}
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "gridPos": {
            "x": number % COLUMNS * WIDTH,
            "y": number // COLUMNS * HEIGHT,
            "w": WIDTH,
            "h": HEIGHT,
        },
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                "min": 0,
                "custom": {
                    "lineWidth": 1,
                    "fillOpacity": 30 if panel.stacked else 5,
                    "stacking": stacking,
                    "showPoints": "never",
                },
            },
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "datasource": SOURCE,
                "expr": query,
                "legendFormat": legend,
            }
            for place, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Source"}


def _fleets() -> list[dict[str, Any]]:
    """Dashboard variables, one per fleet label. Each lists the values that match the selection of
    the previous variables."""
    variables = []
    for place, label in enumerate(FLEET_LABELS):
        within = ", ".join(f'{before}=~"${before}"' for before in FLEET_LABELS[:place])
        series = f"rayfleet_node_processes{{{within}}}"
        variables.append(_variable(label, f"label_values({series}, {label})"))
    return variables


def _models() -> dict[str, Any]:
    return _variable("model", f"label_values(rayfleet_workers{{{F}}}, model_name)")


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": name.capitalize(),
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": f"{name}s"},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def main(folder: Path = FOLDER) -> None:
    """Writes one file per board to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for board in BOARDS:
        (folder / f"{board.name}.json").write_text(text(board))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
