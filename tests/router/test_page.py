"""The page at / is public, shows nothing without a key, and loads nothing from elsewhere."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.cli import fleet_rates
from router.page.routes import CONTENT_TYPES
from tests.support.paths import ROOT
from tests.support.worker.played_engine import INFO
from worker.metrics.collector import WorkerView, worker_metrics
from worker.metrics.latency import WorkerLatency
from worker.protocol.adapters import AdapterRef, AdapterTotals
from worker.protocol.exposition import TEXT, render
from worker.protocol.messages import LoadSnapshot

STATIC = ROOT / "router" / "page" / "static"
FILES = sorted(path.name for path in STATIC.iterdir() if path.name != "index.html")
SOURCES = {path.name: path.read_text() for path in STATIC.iterdir()}


async def test_the_page_and_its_files_are_open_and_nothing_else_is(rig: Any) -> None:
    await rig.start(api_keys=("alpha",))
    page = await rig.client.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "stub" not in page.text
    for name in FILES:
        answer = await rig.client.get(f"/ui/{name}")
        assert answer.status_code == 200
        assert answer.headers["content-type"] == CONTENT_TYPES[Path(name).suffix]
        assert answer.content == (STATIC / name).read_bytes()
    for path in (
        "/v1/models",
        "/metrics",
        "/load",
        "/sessions",
        "/openapi.json",
        "/ui",
        "/index.html",
        "//metrics",
    ):
        assert (await rig.client.get(f"http://gateway{path}")).status_code == 401, path
    for path in ("/ui/../metrics", "/ui/%2e%2e/metrics", "/ui/index.html", "/ui/routes.py", "/ui/"):
        answer = await rig.client.get(f"http://gateway{path}")
        assert answer.status_code in (401, 404), path
    assert (await rig.client.post("/")).status_code == 405
    assert (await rig.client.head("/")).content == b""


async def test_headers_forbid_content_of_other_hosts(rig: Any) -> None:
    await rig.start()
    for path in ("/", "/ui/main.js"):
        headers = (await rig.client.get(path)).headers
        policy = dict(
            part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";")
        )
        assert policy.pop("default-src") == "'none'"
        assert policy.pop("frame-ancestors") == policy.pop("form-action") == "'none'"
        assert policy.pop("require-trusted-types-for") == "'script'"
        assert policy.pop("trusted-types") == "'none'"
        assert set(policy.values()) == {"'self'"}, "no host, nothing inline, no eval"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        again = await rig.client.get(path, headers={"if-none-match": headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


async def test_behind_a_proxy_files_are_below_its_path(rig: Any) -> None:
    await rig.start(root_path="/llm")
    for path in ("/llm", "/llm/", "/"):
        assert '<base href="/llm/">' in (await rig.client.get(path)).text
    assert (await rig.client.get("/llm/ui/main.js")).status_code == 200


def test_all_that_is_named_is_there_and_nothing_is_unused() -> None:
    named = set(re.findall(r"ui/([\w.]+)", SOURCES["index.html"]))
    for text in SOURCES.values():
        named |= set(re.findall(r'from "\./([\w.]+)"', text))
    assert named == set(FILES)


@pytest.mark.parametrize("name", SOURCES)
def test_nothing_is_of_another_host_inline_or_read_as_html(name: str) -> None:
    text = SOURCES[name].replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|//[\w-]+\.\w|@import|\burl\(", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b", text)
    if name == "index.html":
        assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", text)


async def test_metrics_that_the_page_and_top_read_are_exported(rig: Any) -> None:
    read = set(re.findall(r'"(rayfleet_\w+)"', SOURCES["metrics.js"]))
    read |= set(re.findall(r'"(rayfleet_\w+)"', Path(fleet_rates.__file__).read_text()))
    assert len(read) > 15
    route = replace(rig.config.models[0], enable_lora=True, lora_modules=("french",))
    rig.workers[0].info.adapters = [AdapterRef("french", "/french", "v")]
    rig.workers[0].adapters = AdapterTotals(on_device=["v"])
    await rig.start(models=(route,))
    await rig.chat(slo={"ttft_ms": 60000})
    view = WorkerView("stub", "w", 1, INFO, LoadSnapshot(), WorkerLatency())
    worker_text = render(worker_metrics(view), TEXT).decode()
    exposed = set(
        re.findall(r"^(rayfleet_\w+)", (await rig.client.get("/metrics")).text + worker_text, re.M)
    )
    missing = {name for name in read if not {name, f"{name}_bucket"} & exposed}
    assert not missing
