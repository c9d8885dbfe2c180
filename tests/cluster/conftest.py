"""HAProxy for the tests that need one, and the gateway that it falls back on."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator

import pytest

from cluster.directories import private_directory
from cluster.haproxy import BINARY_VARIABLE
from tests.support.cluster.serve_haproxy import Gateway, Proxy, settings_of


@pytest.fixture
async def fallback() -> Gateway:
    gateway = Gateway("fallback")
    await gateway.start()
    return gateway


@pytest.fixture
async def proxy(fallback: Gateway, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Proxy]:
    directory = private_directory()
    settings = settings_of(directory)
    proxy = Proxy(settings)
    proxy.fall_back_on(fallback)
    wrapper = settings[BINARY_VARIABLE]
    monkeypatch.setattr("ray.serve._private.haproxy.RAY_SERVE_HAPROXY_BINARY_PATH", wrapper)
    try:
        yield proxy
    finally:
        await proxy.stop()
        shutil.rmtree(directory)
