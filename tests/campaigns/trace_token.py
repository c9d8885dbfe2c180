"""`make trace-token`: lists the files and functions of this project that one decoded token runs
through.

The gateway, worker frontend, engine core and rank of the demo model run in one process. Each has
its own thread, and they are connected by the same sockets as in production. A streaming request
without optional features decodes on CPU. Calls are counted from one step to the next. The report
covers the most frequent kind of step, so heartbeats, new pages and digests do not count.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import httpx

from cluster.bench.report import Check, Result, at_most, checks_json
from cluster.config import find_demo_model
from router.api.app import create_app
from router.channel import WorkerLink
from router.config import GatewayConfig, ModelRoute
from router.gateway import Gateway
from tests.campaigns.checks import check_main
from tests.support.paths import ROOT
from worker.config import EngineConfig
from worker.core.executor_remote import ProcessExecutor
from worker.core.loop import serve_engine
from worker.frontend.attach import AttachServer
from worker.frontend.server import WorkerFrontend
from worker.rank.main import run_rank

FLOORS = ("cluster", "router", "worker", "kernels")
STEP_ENTRIES = {
    "gateway": "WorkerLink.data_received",
    "front": "EngineConnection._read",
    "core": "EngineCore.step",
    "rank": "Rank.launch",
}
"""Function at the start of each step, keyed by room."""
MAX_FILES, MAX_FUNCTIONS, MAX_CORE_FUNCTIONS = 45, 120, 60
_WARM_UP_LEN = 400
"""Number of tokens to decode before the request. The engine sends a StepLimit with each of the
first 320 steps, before it can predict step times."""
_TIMEOUT_S = 300.0
_WORKER_ID = "w0"


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceOptions:
    """The request to trace."""

    output_len: int = 64
    """Number of tokens to decode. The default is enough for most steps to be of the same kind."""

    def __post_init__(self) -> None:
        if self.output_len < 16:
            raise ValueError("--output-len must be at least 16")


def run_trace(options: TraceOptions) -> Result:
    """Traces a request and reports the functions that one of its tokens runs through, by room."""
    return report({room: typical_step(calls) for room, calls in _record(options).items()})


def report(steps: dict[str, set[CodeType]]) -> Result:
    """Numbers and names of the functions that a token runs through, by room."""
    entered = {room: _by_file(codes) for room, codes in steps.items()}
    rooms = {
        room: {"files": len(files), "functions": sum(map(len, files.values()))}
        for room, files in entered.items()
    }
    num_files = len({file for files in entered.values() for file in files})
    num_functions = sum(room["functions"] for room in rooms.values())
    checks: list[Check] = [
        at_most("files", num_files, "", MAX_FILES),
        at_most("functions", num_functions, "", MAX_FUNCTIONS),
        at_most("core_functions", rooms["core"]["functions"], "", MAX_CORE_FUNCTIONS),
    ]
    return {
        "files": num_files,
        "functions": num_functions,
        "core_functions": rooms["core"]["functions"],
        "rooms": rooms,
        "entered": {
            room: {file: ", ".join(names) for file, names in files.items()}
            for room, files in entered.items()
        },
        "checks": checks_json(checks),
    }


def typical_step(steps: Sequence[Sequence[CodeType]]) -> set[CodeType]:
    """Functions of the most frequent kind of step.

    Args:
        steps: calls of each step, in order.

    Raises:
        ValueError: no steps were recorded.
    """
    if not steps:
        raise ValueError("no steps were recorded: STEP_ENTRIES names a function that is not called")
    [(functions, _)] = Counter(map(frozenset, steps)).most_common(1)
    return set(functions)


class Recorder:
    """Records calls of this project's functions in one thread, step by step.

    Args:
        entry: qualified name of the function at the start of a step.
    """

    def __init__(self, entry: str) -> None:
        self.steps: list[list[CodeType]] = []
        """Calls of each step; the last step is incomplete."""
        self.is_on = False
        self._entry = entry

    def install(self) -> None:
        """Starts recording the calling thread."""
        sys.setprofile(self._profile)

    def _profile(self, frame: FrameType, event: str, arg: object) -> None:
        if not self.is_on or event != "call":
            return
        code = frame.f_code
        if code.co_qualname.endswith(self._entry):
            self.steps.append([])
        if self.steps:
            self.steps[-1].append(code)


def _by_file(codes: set[CodeType]) -> dict[str, list[str]]:
    """Names of this project's functions, keyed by file; excludes comprehensions."""
    found: dict[str, list[str]] = {}
    for code in codes:
        path = Path(code.co_filename)
        if not path.is_relative_to(ROOT) or code.co_name.endswith(("comp>", "genexpr>")):
            continue
        file = path.relative_to(ROOT)
        if file.parts[0] in FLOORS:
            found.setdefault(str(file), []).append(code.co_qualname)
    return {file: sorted(found[file]) for file in sorted(found)}


def _record(options: TraceOptions) -> dict[str, list[list[CodeType]]]:
    """Calls of each step of one request, keyed by room; excludes the first steps and the last
    one."""
    recorders = {room: Recorder(entry) for room, entry in STEP_ENTRIES.items()}
    with _worker(recorders) as socket:
        recorders["gateway"].install()
        try:
            asyncio.run(_request(options, socket, recorders))
        finally:
            sys.setprofile(None)
    return {room: recorder.steps[4:-4] for room, recorder in recorders.items()}


@contextmanager
def _worker(recorders: dict[str, Recorder]) -> Iterator[str]:
    """Serves the demo model from threads; yields the path of the frontend's attach socket."""
    config = EngineConfig.of(
        model=find_demo_model(),
        device="cpu",
        cpu_threads=1,
        max_model_len=512,
        kv_cache_tokens=4096,
    )
    # Rank 0 is a thread, not a child process.
    executor = mock.patch(
        "worker.core.loop.create_executor",
        lambda config, directory, **_: ProcessExecutor(config, directory, spawn=()),
    )
    with executor, _FrontThread(recorders["front"]) as front:
        threads = (
            _Thread(recorders["core"], partial(serve_engine, config, front.directory)),
            _Thread(recorders["rank"], partial(run_rank, 0, config, front.directory)),
        )
        try:
            yield front.wait_ready()
        finally:
            front.close()
            for thread in threads:
                thread.join(_TIMEOUT_S)


class _Thread(threading.Thread):
    """Thread that runs one room's process under a recorder."""

    def __init__(self, recorder: Recorder, run: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self._recorder, self._run = recorder, run
        self.start()

    def run(self) -> None:
        self._recorder.install()
        self._run()


class _FrontThread:
    """Event loop of the worker's frontend, in a separate thread."""

    def __init__(self, recorder: Recorder) -> None:
        self.directory = ""
        """The engine's private folder."""
        self._loop = asyncio.new_event_loop()
        self._front: WorkerFrontend
        self._server: AttachServer
        self._thread = _Thread(recorder, self._loop.run_forever)

    def __enter__(self) -> _FrontThread:
        self.directory = self._await(self._open())
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_TIMEOUT_S)
        self._loop.close()

    def wait_ready(self) -> str:
        """Waits for the engine; returns the path of the attach socket."""
        self._await(self._front.wait_ready())
        assert self._server.path is not None
        return self._server.path

    def close(self) -> None:
        """Closes the frontend, which ends the engine."""
        self._await(self._close())

    def _await(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_TIMEOUT_S)

    async def _open(self) -> str:
        self._front = WorkerFrontend(_WORKER_ID, step_timeout_s=0.0)
        self._server = AttachServer(self._front)
        await self._server.open()
        return self._front.open()

    async def _close(self) -> None:
        self._server.close()
        self._front.close()


class _SocketTransport:
    """Transport of the gateway to one frontend, over its attach socket."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._link: WorkerLink

    async def attach(
        self, worker_id: str, gateway_id: str, on_item: Callable[[bytes], None]
    ) -> None:
        self._link = await WorkerLink.open(self._path, gateway_id, on_item)
        raise ConnectionError(await self._link.wait_ended())

    async def submit(self, worker_id: str, payload: bytes) -> bytes:
        return await self._link.call(payload)

    async def heartbeat(self, worker_id: str) -> bytes | None:
        return None

    def watch_workers(self, on_change: Callable[[tuple[str, ...]], None]) -> None:
        on_change((_WORKER_ID,))


async def _request(options: TraceOptions, socket: str, recorders: dict[str, Recorder]) -> None:
    """Streams a completion through a gateway, once to warm up and once recorded."""
    route = ModelRoute(name="demo", model=find_demo_model())
    transport = _SocketTransport(socket)
    gateway = Gateway(GatewayConfig(models=(route,)), {"demo": transport}, None)
    await gateway.start()
    try:
        assert await gateway.wait_ready(_TIMEOUT_S), "the worker does not attach"
        app = httpx.ASGITransport(app=create_app(gateway))
        async with httpx.AsyncClient(transport=app, base_url="http://gateway") as client:
            body = {
                "model": "demo",
                "messages": [{"role": "user", "content": "Tell me a story."}],
                "ignore_eos": True,
                "stream": True,
            }
            for max_tokens, is_recorded in ((_WARM_UP_LEN, False), (options.output_len, True)):
                for recorder in recorders.values():
                    recorder.is_on = is_recorded
                async with asyncio.timeout(_TIMEOUT_S):
                    response = await client.post(
                        "/v1/chat/completions", json={**body, "max_tokens": max_tokens}
                    )
                response.raise_for_status()
            for recorder in recorders.values():
                recorder.is_on = False
    finally:
        await gateway.close()


def main() -> int:
    """Entry point of `make trace-token`; returns 1 if a check fails."""
    return check_main(run_trace, TraceOptions)


if __name__ == "__main__":
    sys.exit(main())
