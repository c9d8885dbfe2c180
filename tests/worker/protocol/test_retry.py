"""Which failures of a start are retried, and when."""

from __future__ import annotations

import itertools
import math
import pickle

import httpx2
import pytest
from huggingface_hub import errors

from worker.core.executor import RankFailure
from worker.protocol.hub import hub_may_heal
from worker.protocol.retry import (
    FIRST_DELAY_S,
    JITTER,
    MAX_DELAY_S,
    RemoteFailure,
    StartDelay,
    Unavailable,
    delays,
    may_heal,
    until_started,
)


def answer(status: int, kind: type[errors.HfHubHTTPError] = errors.HfHubHTTPError) -> Exception:
    request = httpx2.Request("GET", "http://hub/api/models/org/name")
    return kind("the Hub's words", response=httpx2.Response(status, request=request))


@pytest.mark.parametrize(
    ("error", "heals"),
    [
        (Unavailable("no such folder"), True),
        (OSError(5, "Input/output error"), True),
        (FileNotFoundError("gone"), True),
        (ConnectionResetError("by peer"), True),
        (TimeoutError("store"), True),
        (EOFError("the coordinator is gone"), True),
        (RuntimeError("Connection closed by peer"), True),  # Gloo
        (RemoteFailure("a rank died"), True),
        (RankFailure("rank 1 failed", heals=False), False),
        (ValueError("unsupported architecture"), False),
        (KeyError("hidden_size"), False),
        (TypeError("an int"), False),
        (AssertionError("a fault of ours"), False),
        (ImportError("opentelemetry"), False),
        (NotImplementedError("on this device"), False),
        (PermissionError(13, "Permission denied"), False),
    ],
    ids=repr,
)
def test_transient_errors_are_classified_by_type(error: Exception, heals: bool) -> None:
    assert may_heal(error) == heals


@pytest.mark.slow  # it imports torch
def test_failures_of_torch_are_transient_except_for_not_implemented() -> None:
    import torch
    import torch.distributed as dist

    for kind in (dist.DistError, dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError):
        assert may_heal(kind("rendezvous"))
    assert may_heal(torch.OutOfMemoryError("CUDA out of memory"))
    assert may_heal(torch.AcceleratorError("CUDA error: uncorrectable ECC error", 214))


@pytest.mark.parametrize(
    ("error", "heals"),
    [
        *((answer(status), True) for status in (408, 429, 500, 502, 503, 504)),
        *((answer(status), False) for status in (400, 401, 403, 404)),
        (answer(404, errors.RepositoryNotFoundError), False),
        (answer(403, errors.GatedRepoError), False),
        (answer(404, errors.RevisionNotFoundError), False),
        (answer(404, errors.RemoteEntryNotFoundError), False),
        (errors.OfflineModeIsEnabled("offline"), True),
        (errors.LocalEntryNotFoundError("not in the cache"), True),
        (errors.FileMetadataError("no ETag: a proxy answered"), True),
        (errors.HFValidationError("not a repository's name"), False),
        (httpx2.ConnectError("refused"), True),
        (httpx2.ConnectTimeout("silence"), True),
        (httpx2.ReadTimeout("silence"), True),
        (httpx2.RemoteProtocolError("cut off"), True),
        (httpx2.UnsupportedProtocol("HF_ENDPOINT without http://"), False),
    ],
    ids=repr,
)
def test_transient_hub_errors_are_classified_by_type(error: Exception, heals: bool) -> None:
    assert hub_may_heal(error) == heals


def test_the_classification_survives_pickling() -> None:
    failure = pickle.loads(pickle.dumps(RankFailure("rank 0 failed", heals=False)))
    assert (str(failure), failure.heals) == ("rank 0 failed", False)


@pytest.mark.parametrize(("draw", "off"), [(0.0, 1 - JITTER), (0.5, 1.0), (0.999999, 1 + JITTER)])
def test_delays_grow_to_a_limit(draw: float, off: float) -> None:
    waits = list(itertools.islice(delays(lambda: draw), 30))
    assert waits[0] == pytest.approx(FIRST_DELAY_S * off, rel=1e-3)
    assert waits == sorted(waits)
    assert waits[-1] == waits[-2] == pytest.approx(MAX_DELAY_S * off, rel=1e-3)


class World:
    """A clock, and a start that fails for a while."""

    def __init__(self, error: Exception, heals_at: float) -> None:
        self.now = 0.0
        self.tries: list[float] = []
        self.reports: list[StartDelay | None] = []
        self._error = error
        self._heals_at = heals_at

    async def attempt(self) -> str:
        self.tries.append(self.now)
        if self.now < self._heals_at:
            raise self._error
        return "started"

    async def sleep(self, delay_s: float) -> None:
        self.now += delay_s

    async def run(self, retry_s: float) -> str:
        return await until_started(
            self.attempt,
            retry_s=retry_s,
            report=self.reports.append,
            clock=lambda: self.now,
            sleep=self.sleep,
            rng=lambda: 0.5,
        )


async def test_a_mount_that_comes_after_a_minute_is_found_soon() -> None:
    world = World(Unavailable("first line\nthe model folder /models/m does not exist\n"), 60.0)
    assert await world.run(math.inf) == "started"
    assert 60.0 <= world.now < 60.0 * 1.6
    *waited, last = world.reports
    assert last is None, "no start is delayed any more"
    assert [report.attempts for report in waited if report] == [1, 2, 3, 4, 5, 6, 7, 8][
        : len(waited)
    ]
    assert {report.reason for report in waited if report} == {
        "the model folder /models/m does not exist"
    }


async def test_transient_failures_are_retried_forever_with_delays() -> None:
    world = World(RuntimeError("NCCL"), 7 * 86400.0)
    assert await world.run(math.inf) == "started"
    assert len(world.tries) < 7 * 86400 / MAX_DELAY_S + 20


@pytest.mark.parametrize("retry_s", [0.0, math.inf])
async def test_permanent_failures_are_raised_immediately(retry_s: float) -> None:
    world = World(ValueError("unsupported architecture"), math.inf)
    with pytest.raises(ValueError, match="unsupported architecture"):
        await world.run(retry_s)
    assert (world.tries, [r for r in world.reports if r]) == ([0.0], [])


@pytest.mark.parametrize(("retry_s", "last_try"), [(0.0, 0.0), (10.0, 9.2)])
async def test_retries_end_with_their_time(retry_s: float, last_try: float) -> None:
    world = World(Unavailable("no folder"), math.inf)
    with pytest.raises(Unavailable):
        await world.run(retry_s)
    assert world.tries[-1] == pytest.approx(last_try, abs=0.1)
    assert [r for r in world.reports if r] == [] or world.reports[-1] is None
