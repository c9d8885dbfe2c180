"""Streams in a thread that records every token and its time."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import aiohttp
import uvloop

from cluster.bench.client import open_session


@dataclass(kw_only=True, slots=True)
class Stream:
    """One streamed completion."""

    model: str
    num_tokens: int
    """Number of requested tokens."""
    worker: str = ""
    """Worker on which the stream started."""
    token_ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """Times of the tokens' events."""
    ended: bool = False
    error: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether all tokens were received."""
        return self.ended and not self.error and len(self.token_ids) == self.num_tokens

    @property
    def longest_pause_s(self) -> float:
        """Longest time between two events."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return max((later - sooner for sooner, later in pairs), default=0.0)


class NodeStreams:
    """Streams with different prompts, all started at once; `counts` is the number of streams per
    model."""

    def __init__(self, base_url: str, counts: Mapping[str, int], num_tokens: int) -> None:
        self._url = f"{base_url}/v1/completions"
        self._streams = [
            Stream(model=model, num_tokens=num_tokens)
            for model, count in counts.items()
            for _ in range(count)
        ]
        self._thread = threading.Thread(target=lambda: uvloop.run(self._run()), daemon=True)
        self._thread.start()

    def of(self, model: str) -> list[Stream]:
        """Current streams of a model."""
        return [stream for stream in self._streams if stream.model == model]

    def wait_begun(self) -> None:
        """Waits until each stream has received a token or failed."""
        while not all(stream.token_ids or stream.ended for stream in self._streams):
            time.sleep(0.005)

    def wait(self, model: str | None = None) -> list[Stream]:
        """Waits for all streams, or for those of one model, and returns them."""
        streams = self._streams if model is None else self.of(model)
        while not all(stream.ended for stream in streams):
            time.sleep(0.01)
        return streams

    async def _run(self) -> None:
        async with open_session({}) as session, asyncio.TaskGroup() as group:
            for number, stream in enumerate(self._streams):
                group.create_task(self._read(session, number, stream))

    async def _read(self, session: aiohttp.ClientSession, number: int, stream: Stream) -> None:
        body = {
            "model": stream.model,
            "prompt": f"{number}: a prompt of its own",
            "max_tokens": stream.num_tokens,
            "ignore_eos": True,
            "temperature": float(number % 2),
            "seed": number,
            "stream": True,
            "return_token_ids": True,
        }
        stream.error = "it did not say that it was done"
        try:
            async with session.post(self._url, data=json.dumps(body)) as response:
                stream.worker = response.headers.get("x-rayfleet-worker", "")
                async for line in response.content:
                    if not line.startswith(b"data: "):
                        continue
                    if line.startswith(b"data: [DONE]"):
                        stream.error = ""
                    else:
                        self._take(stream, json.loads(line[6:]))
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            stream.error = f"{type(error).__name__}: {error}"
        stream.ended = True

    def _take(self, stream: Stream, event: dict[str, object]) -> None:
        choices = event.get("choices")
        if not isinstance(choices, list):
            stream.error = f"event: {event}"
            return
        stream.times.append(time.perf_counter())
        for choice in choices:
            stream.token_ids += choice["token_ids"]
