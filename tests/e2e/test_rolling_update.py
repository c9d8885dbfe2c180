"""The fleet is deployed again under load: all gateways and workers are replaced, no request fails.

`make check-rolling-update` does it with a thousand requests and more.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.campaigns.checks import is_whole
from tests.support.fleet.client_load import ClientLoad, ClientOptions
from tests.support.fleet.running_fleet import (
    ADMIN_KEY,
    API_KEY,
    DEADLINE_S,
    MODEL,
    RunningFleet,
    models_of,
    wait_until,
)
from tests.support.paths import ROOT

NUM_BEFORE = 12


@pytest.mark.long
def test_a_rolling_update_fails_no_request(
    fleet: RunningFleet, tiny_chat_model: Path, installed_demo: Path
) -> None:
    # Two cores must start eight processes meanwhile: the load leaves them room.
    options = ClientOptions(num_clients=4, num_idle_clients=2, long_output_len=200, pause_s=0.25)
    headers = {"authorization": f"Bearer {API_KEY}"}
    with ClientLoad(fleet.base_url, options, MODEL, headers) as load:
        load.wait_for(NUM_BEFORE)
        fleet.admission(MODEL, prefill_force_fifo_every=7)
        old = {*fleet.fronts(), *fleet.gateways()}
        assert len(old) == 3
        deploy_again(fleet, tiny_chat_model, installed_demo)
        wait_until(lambda: not old & {*fleet.fronts(), *fleet.gateways()})
        load.wait_for(NUM_BEFORE)
        records = load.stop()
    assert [record for record in records if not is_whole(record)] == []
    fleet.wait_ready(num_workers=2)
    assert fleet.admission(MODEL)["prefill_force_fifo_every"] == 7, "gateways remember"


def deploy_again(fleet: RunningFleet, model: Path, demo: Path) -> None:
    """Deploys with one changed engine option, from a separate process that joins the fleet."""
    replaced, elastic = models_of(model, demo)
    config = {
        "port": int(fleet.base_url.rpartition(":")[2]),
        "api_keys": [API_KEY],
        "admin_api_key": ADMIN_KEY,
        "models": [{**replaced, "max_num_seqs": 48}, elastic],
    }
    address, environment = fleet.ray()
    subprocess.run(
        [sys.executable, "-m", "tests.support.fleet.deploying", address],
        cwd=ROOT,
        env=environment,
        input=json.dumps(config).encode(),
        timeout=DEADLINE_S,
        check=True,
    )
