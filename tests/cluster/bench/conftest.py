"""A small OpenAI-like server with known counts, for the load client."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.cluster.openai_backend import Backend, running_backend


@pytest.fixture
def backend() -> Iterator[Backend]:
    """A running Backend on a free port of 127.0.0.1."""
    with running_backend() as backend:
        yield backend
