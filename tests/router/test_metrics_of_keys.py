"""/metrics for the holder of a key: no series of other keys, unless the key has the permission."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.core import CounterMetricFamily
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from router.keys import digest_of
from router.metrics.visibility import visible_to
from worker.protocol.exposition import OPENMETRICS, TEXT, render

KEYS = """
[alice]
key = "alice-key"
[bob]
key = "bob-key"
[elsewhere]
key = "elsewhere-key"
models = ["another"]
[operator]
key = "operator-key"
monitoring = true
"""
FORMATS = {TEXT: parse, OPENMETRICS: parse_openmetrics}


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = tmp_path / "keys"
    path.write_text(KEYS)
    return str(path)


async def scrape(rig: Any, key: str, accept: str = TEXT) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}", "accept": accept}
    response: httpx.Response = await rig.client.get("/metrics", headers=headers)
    assert response.status_code == 200
    return response


def labels_of(response: httpx.Response, label: str, accept: str = TEXT) -> set[str]:
    """All values of a label; fails if the text is malformed."""
    families = FORMATS[accept](response.text)
    samples = [sample for family in families for sample in family.samples]
    return {sample.labels[label] for sample in samples if label in sample.labels}


async def requests_of_all(rig: Any, keys: tuple[str, ...]) -> None:
    for key in keys:
        rig.client.headers["authorization"] = f"Bearer {key}"
        assert (await rig.chat()).status_code == 200


@pytest.mark.parametrize("accept", FORMATS)
async def test_a_key_sees_its_own_series_and_those_of_the_fleet(rig, key_file, accept):
    await rig.start(api_key_file=key_file)
    await requests_of_all(rig, ("alice-key", "bob-key"))
    visible, everything = await scrape(rig, "alice-key", accept), await scrape(rig, "operator-key")
    assert labels_of(visible, "tenant", accept) == {"alice"}
    assert "bob" not in visible.text
    assert "rayfleet_num_workers_ready" in visible.text
    assert labels_of(everything, "tenant") == {"alice", "bob", "other"}


async def test_keys_without_a_name_see_no_digests_of_others(rig):
    await rig.start(api_keys=("alpha", "beta"))
    await requests_of_all(rig, ("alpha", "beta"))
    [alpha] = labels_of(await scrape(rig, "alpha"), "tenant")
    [beta] = labels_of(await scrape(rig, "beta"), "tenant")
    assert alpha != beta
    assert digest_of(b"alpha").hex()[:16] != alpha, "the name does not reveal the key's digest"


async def test_series_of_models_that_a_key_may_not_use_are_hidden(rig, key_file):
    await rig.start(api_key_file=key_file)
    await requests_of_all(rig, ("alice-key",))
    assert labels_of(await scrape(rig, "elsewhere-key"), "model_name") == set()
    assert labels_of(await scrape(rig, "alice-key"), "model_name") == {"stub"}


@pytest.mark.parametrize("fairness", ["user", "none"])
async def test_users_of_other_keys_are_hidden(rig, fairness):
    await rig.start(api_keys=("alpha", "beta"), fairness_key=fairness)
    rig.client.headers["authorization"] = "Bearer alpha"
    await rig.chat(user="somebody")
    tenants = labels_of(await scrape(rig, "beta"), "tenant")
    assert tenants == ({"default"} if fairness == "none" else set())


async def test_without_keys_everyone_sees_all(rig):
    await rig.start(fairness_key="user")
    assert (await rig.chat(user="somebody")).status_code == 200
    assert len(labels_of(await rig.client.get("/metrics"), "tenant")) == 2


names = st.text(st.sampled_from(string.ascii_lowercase + '",{}=\\\n\r #'), min_size=1, max_size=12)


@given(st.sets(names, min_size=1, max_size=6), names, st.sampled_from(list(FORMATS)))
def test_no_label_value_lets_a_hidden_series_through(others, model, content_type):
    """Values that look like the end of a label, another label or another line."""
    family = CounterMetricFamily("rayfleet_x", "Text", labels=["model_name", "tenant", "zone"])
    for number, tenant in enumerate(sorted(others | {"own", f'{model}",tenant="own'})):
        family.add_metric([model, tenant, '",tenant="own'], number)
    text = visible_to(render([family], content_type), {"own"})
    kept = [sample for f in FORMATS[content_type](text.decode()) for sample in f.samples]
    assert {sample.labels["tenant"] for sample in kept} == {"own"}
    assert visible_to(render([family], content_type), {"own"}, {"no such model"}).count(b"{") == 0
