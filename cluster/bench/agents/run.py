"""`rayfleet bench agents`: turns per minute and times to first token of coding agents."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.bench.agents.loop import AgentLoops, TurnRecord
from cluster.bench.agents.sessions import random_sessions, recorded_sessions
from cluster.bench.client import open_session
from cluster.bench.prompts import PromptSpace
from cluster.bench.report import Result, at_least, checks_json, exactly, note
from cluster.bench.serve import (
    CHAT,
    HEADERS_FLAG,
    ServeOptions,
    model_card,
    request_headers,
    resolve,
)
from cluster.bench.stats import percentile, share


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentOptions:
    """Options of `bench agents`. Field names are the flags."""

    base_url: str = "http://127.0.0.1:8000"
    """Base URL of the server."""
    model: str | None = None
    """Name of the model; the first one listed by the server if unset."""
    tokenizer: str | None = None
    """Folder with tokenizer.json; by default the model's, if the server reports a local folder."""
    api_key: str | None = None
    """API key; defaults to the environment variable OPENAI_API_KEY."""
    headers: tuple[str, ...] = field(default=(), metadata=HEADERS_FLAG)
    """Additional header for each request; may be repeated."""
    sessions: tuple[int, ...] = (1, 2, 4, 8)
    """Numbers of concurrent sessions, measured in the given order, such as 8 16."""
    duration_s: float = 120.0
    """Duration of each measurement in seconds, after the warm-up."""
    warmup_s: float = 30.0
    """Duration of the warm-up before each measurement in seconds."""
    scale: float = 1.0
    """Factor for all lengths in tokens. With 1, contexts reach 20,000 to 150,000 tokens; use a
    smaller factor for models with a shorter context, such as 0.02 for the demo."""
    trace: str | None = None
    """CSV file with recorded sessions, as in TraceLab; random sessions if unset."""
    seed: int = 0
    """Seed of sessions and texts. Servers cache prompts: use another seed for each run."""

    def __post_init__(self) -> None:
        for name in ("duration_s", "scale"):
            if getattr(self, name) <= 0:
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag} must be greater than 0, got {getattr(self, name):g}")
        if self.warmup_s < 0:
            raise ValueError(f"--warmup-s must not be negative, got {self.warmup_s:g}")
        if not self.sessions or min(self.sessions) < 1:
            raise ValueError(
                "--sessions must be one or more positive integers, such as `--sessions 8 16`, got "
                f"{' '.join(map(str, self.sessions)) or 'none'}"
            )


def run_agents(options: AgentOptions) -> Result:
    """Measures each number of sessions; the result has a check that fails if any request failed.

    Raises:
        ValueError: no model or tokenizer is found, or the server is not reachable.
    """
    serve, space = resolve(
        ServeOptions(
            base_url=options.base_url,
            endpoint=CHAT,
            model=options.model,
            tokenizer=options.tokenizer,
            api_key=options.api_key,
            headers=options.headers,
        )
    )
    if serve.tokenizer is None:
        raise ValueError(
            f"{options.base_url} reports no local folder with a tokenizer: set --tokenizer"
        )
    max_model_len = model_card(serve).get("max_model_len")
    rows = []
    errors: Counter[str] = Counter()
    for place, number in enumerate(options.sessions):
        seed = options.seed + 1_000 * place
        ended, oldest_s = asyncio.run(_measure(options, serve, space, max_model_len, number, seed))
        measured = [turn for turn in ended if turn.ended_at >= options.warmup_s]
        errors.update(turn.record.error for turn in ended if turn.record.error)
        rows.append({"sessions": number, **_figures(options, measured, oldest_s)})
        note(f"{number} sessions: {rows[-1]['turns_per_minute']:.1f} turns per minute")
    return {
        "model_id": serve.model,
        "base_url": serve.base_url,
        "scale": options.scale,
        "trace": options.trace,
        "seed": options.seed,
        "rows": rows,
        "failed": errors.total(),
        "errors": dict(errors.most_common()),
        "checks": checks_json(
            [
                exactly("failed_requests", errors.total(), "requests", 0),
                at_least("turns", min(row["turns"] for row in rows), "turns", 1),
            ]
        ),
    }


async def _measure(
    options: AgentOptions,
    serve: ServeOptions,
    space: PromptSpace,
    max_model_len: int | None,
    num_sessions: int,
    seed: int,
) -> tuple[list[TurnRecord], float]:
    """Turns with this number of sessions, and how many seconds the oldest request has been waiting
    at the end."""
    if options.trace is None:
        sessions = random_sessions(options.scale, seed)
    else:
        sessions = recorded_sessions(Path(options.trace), options.scale)
    fields = {
        "model": serve.model,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with open_session(request_headers(serve)) as session:
        url = serve.base_url.rstrip("/") + CHAT
        loops = AgentLoops(session, url, fields, sessions, space, max_model_len, seed)
        oldest_s = await loops.run(num_sessions, options.warmup_s + options.duration_s)
    return loops.ended, oldest_s


def _figures(
    options: AgentOptions, measured: Sequence[TurnRecord], oldest_s: float
) -> dict[str, Any]:
    """Metrics with this number of sessions; times in ms, as in `bench serve`."""
    done = [turn for turn in measured if not turn.record.error]
    num_input = sum(turn.record.prompt_len for turn in done)
    figures: dict[str, Any] = {
        "turns": len(done),
        "turns_per_minute": 60.0 * len(done) / options.duration_s,
        "mean_prompt_tokens": share(num_input, len(done)),
        "token_hit_rate": share(sum(turn.record.cached_tokens for turn in done), num_input),
    }
    for name, is_first in (("first_turn", True), ("later_turn", False)):
        times = [1e3 * turn.record.ttft for turn in done if turn.is_first == is_first]
        figures[f"median_{name}_ttft_ms"] = percentile(times, 50.0)
        figures[f"p99_{name}_ttft_ms"] = percentile(times, 99.0)
    return {**figures, "longest_unanswered_s": oldest_s, "failed": len(measured) - len(done)}
