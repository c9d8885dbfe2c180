"""Closed loops: each slot runs one session after another, turn by turn, and adds the endpoint's
answers to its context."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import numpy as np

from cluster.bench.agents.sessions import AgentSession, AgentTurn
from cluster.bench.client import Record, Request, send
from cluster.bench.prompts import PromptSpace

SESSION_HEADER: Final = "x-session-id"
"""Header with the session's id, for routers that use one; servers ignore unknown headers."""
TOOL: Final = "bash"
"""Name of the tool that sessions with tool calls use."""
_PAUSE_S: Final = 1.0
"""Pause in seconds after a failed request, so that a server that rejects requests is not
flooded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnRecord:
    """A turn that has ended, successfully or not."""

    is_first: bool
    """Whether this was the session's first turn."""
    record: Record
    ended_at: float
    """Seconds since the loops started."""


class AgentLoops:
    """Sessions of coding agents at an endpoint, a fixed number at a time.

    Args:
        session: HTTP session with the headers of all requests.
        url: URL of the chat completions endpoint.
        fields: fields to include in every request body.
        sessions: source of sessions; each one that ends is followed by the next.
        space: vocabulary and tokenizer of the texts.
        max_model_len: maximum number of tokens of a context; a session that reaches it ends. None
            for no limit.
        seed: seed of the texts.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        fields: Mapping[str, Any],
        sessions: Iterator[AgentSession],
        space: PromptSpace,
        max_model_len: int | None,
        seed: int,
    ) -> None:
        self.ended: list[TurnRecord] = []
        """Turns in the order in which they ended."""
        self._session, self._url, self._fields = session, url, fields
        self._sessions, self._space, self._max_model_len = sessions, space, max_model_len
        self._random = np.random.default_rng(seed)
        self._seed = seed
        self._num_sessions = 0
        self._vocabulary = space.vocabulary
        self._systems: dict[int, asyncio.Future[str]] = {}
        self._started = 0.0
        self._waiting: dict[int, float] = {}
        """Start time of each request in flight, by its number."""
        self._num_requests = 0

    async def run(self, num_sessions: int, duration_s: float) -> float:
        """Runs for `duration_s`; returns how many seconds the oldest request had been waiting at
        the end.

        Requests in flight at the end are cancelled.
        """
        self._started = time.perf_counter()
        slots = [asyncio.create_task(self._slot()) for _ in range(num_sessions)]
        done, _ = await asyncio.wait(slots, timeout=duration_s, return_when=asyncio.FIRST_EXCEPTION)
        oldest = max((self._now() - start for start in self._waiting.values()), default=0.0)
        for slot in slots:
            slot.cancel()
        await asyncio.gather(*slots, return_exceptions=True)
        for slot in done:
            slot.result()
        return oldest

    def _now(self) -> float:
        return time.perf_counter() - self._started

    async def _slot(self) -> None:
        while True:
            await self._run(next(self._sessions))

    async def _run(self, session: AgentSession) -> None:
        """Runs a session to completion; a failed request also ends it."""
        self._num_sessions += 1
        # Ids of an earlier run at the same endpoint would be sessions with other contexts.
        headers = {SESSION_HEADER: f"bench-{self._seed}-{self._num_sessions}"}
        messages: list[dict[str, Any]] = []
        if session.num_system:
            messages.append({"role": "system", "content": await self._system(session)})
        num_context = session.num_system
        for number, turn in enumerate(session.turns):
            num_context += turn.num_appended + turn.num_call + turn.num_output
            if self._max_model_len is not None and num_context > self._max_model_len:
                return
            await self._append(messages, turn)
            if number < session.num_past:
                answer = await self._text(turn.num_output)
                messages.append({"role": "assistant", "content": answer})
                continue
            record = await self._send(messages, turn, headers)
            is_first = number == session.num_past
            self.ended.append(TurnRecord(is_first=is_first, record=record, ended_at=self._now()))
            if record.error:
                await asyncio.sleep(_PAUSE_S)
                return
            messages.append({"role": "assistant", "content": record.text})
            num_context = record.prompt_len + record.output_len
            await asyncio.sleep(turn.gap_s)

    async def _append(self, messages: list[dict[str, Any]], turn: AgentTurn) -> None:
        """Appends the new messages of a turn: a tool call and its result, or a user's message."""
        text = await self._text(turn.num_appended)
        if not turn.num_call:
            messages.append({"role": "user", "content": text})
            return
        call_id = f"call_{len(messages)}"
        arguments = json.dumps({"command": await self._text(turn.num_call)})
        function = {"name": TOOL, "arguments": arguments}
        messages[-1]["tool_calls"] = [{"id": call_id, "type": "function", "function": function}]
        messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    async def _send(
        self, messages: list[dict[str, Any]], turn: AgentTurn, headers: Mapping[str, str]
    ) -> Record:
        number = self._num_requests = self._num_requests + 1
        body = {**self._fields, "messages": messages, "max_tokens": turn.num_output}
        request = Request(
            index=number,
            body=json.dumps(body).encode(),
            prompt_len=0,
            output_len=turn.num_output,
            headers=headers,
            keep_text=True,
        )
        self._waiting[number] = self._now()
        try:
            return await send(self._session, self._url, request)
        finally:
            del self._waiting[number]

    async def _system(self, session: AgentSession) -> str:
        """The system prompt of the session's product, created only once even for concurrent
        sessions."""
        if session.product not in self._systems:
            text = asyncio.ensure_future(self._text(session.num_system))
            self._systems[session.product] = text
        return await self._systems[session.product]

    async def _text(self, num_tokens: int) -> str:
        """A random text of about `num_tokens` tokens, created in a thread, since encoding a long
        text would delay other streams."""
        ids = self._random.choice(self._vocabulary, num_tokens).tolist()
        return await asyncio.to_thread(self._space.as_text, ids)
