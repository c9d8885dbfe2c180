"""Heavy bodies sent while other clients stream, and their effect on those streams and on memory."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.bench.report import Check, at_least, at_most, exactly, note
from tests.campaigns.hostile.bystanders import Bystanders
from tests.campaigns.hostile.clients import (
    Answer,
    Found,
    Problem,
    each,
    judge_found,
    open_session,
    problem_of,
    send,
)
from tests.campaigns.hostile.fleet import (
    KV_CACHE_TOKENS,
    NUM_WORKERS,
    AttackedFleet,
    MemoryLog,
    bystanders_of,
)
from tests.campaigns.hostile.heavy import HeavyCase, heavy_cases
from tests.campaigns.hostile.inputs import MAX_MODEL_LEN, TEXT, VOCABULARY, Case
from worker.frontend.grammar.service import CACHE_BYTES

MIB = 2**20
BYSTANDER_GAP_MS = 250.0
GROWTH_PER_BYTE = 4.0
"""Maximum memory growth per byte of a body: its chunks, the joined body, the parsed values, and
data derived from them."""
SMALL_GROWTH_MIB = 64.0
"""Maximum additional growth in MiB for any body. A few bytes can request 2,048 completions, or 128
texts of 4,096 tokens with 20 log-probabilities each. A completion takes about 10 KiB in the
gateway, the frontend and the rank, log-probabilities of a prompt about 10 MiB, and a body with the
maximum number of values (texts of one letter) about 60 MiB. In addition, each thread keeps 4 MiB of
freed memory."""
FORM_MIB = 5 * CACHE_BYTES / MIB
"""Maximum growth in MiB for a valid grammar; replaces `SMALL_GROWTH_MIB`. A worker caches 64 MiB of
compiled grammars, and its rank caches the matchers of recent ones, which are four times as
large."""
KEPT_MIB = 16.0
BACK_S = 10.0
COMPILER_MIB = 2048.0
"""Memory limit in MiB of a process that compiles grammars; see README."""
HEAVY_ANSWER_S = 300.0
WARM_UP_S = 600.0
SETTLE_S = 60.0
"""Time limit in seconds for streams to continue; reached only on failure."""
Figures = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Attack:
    """Effects of one heavy body."""

    name: str
    is_form: bool
    """Whether the body has a grammar."""
    body_mib: float
    status: int
    seconds: float
    problem: Problem | None
    quiet_gap_ms: float
    """Longest time between two tokens of a bystander in the second before."""
    longest_gap_ms: float
    """Longest time between two tokens from the body's first byte until memory has been freed."""
    num_tokens: int
    """Number of tokens that bystanders received in that time."""
    growth_mib: Mapping[str, float]
    """Maximum growth, keyed by kind of process."""
    kept_mib: Mapping[str, float]
    back_s: float
    """Seconds until no process retained more than noise, or the timeout."""

    @property
    def is_kept(self) -> bool:
        """Whether workers cache its compiled grammar for later requests."""
        return self.is_form and self.status == 200

    @property
    def most_mib(self) -> float:
        """Maximum growth of a process other than grammar compilers."""
        return max(mib for kind, mib in self.growth_mib.items() if kind != "compiler")

    @property
    def beyond_mib(self) -> float:
        """Growth in excess of the limit for the body's size."""
        return self.most_mib - GROWTH_PER_BYTE * self.body_mib

    @property
    def most_kept_mib(self) -> float:
        """Maximum memory retained by a process other than grammar compilers."""
        return max(mib for kind, mib in self.kept_mib.items() if kind != "compiler")

    def summary(self) -> Figures:
        """Metrics as JSON, with only the kinds of processes that grew."""
        return {
            "name": self.name,
            "body_mib": self.body_mib,
            "status": self.status,
            "seconds": self.seconds,
            "problem": self.problem.text if self.problem is not None else "",
            "quiet_gap_ms": self.quiet_gap_ms,
            "longest_gap_ms": self.longest_gap_ms,
            "num_tokens": self.num_tokens,
            "beyond_mib": self.beyond_mib,
            "most_kept_mib": self.most_kept_mib,
            "back_s": self.back_s,
            "growth_mib": {kind: mib for kind, mib in self.growth_mib.items() if mib >= 1.0},
        }


def run_heavy(fleet: AttackedFleet, scale: float, named: str = "") -> tuple[Figures, list[Check]]:
    """Sends each body twice, because the first one can leave memory behind that later ones reuse.

    Args:
        fleet: the fleet under attack.
        scale: fraction of the bodies to send.
        named: only send bodies whose names contain this text; empty sends all.
    """
    cases = [case for case in heavy_cases() if named in case.name]
    chosen = cases[:: max(1, round(1 / scale))]
    asyncio.run(warm_up(fleet))
    attacks: list[Attack] = []
    with bystanders_of(fleet) as bystanders, MemoryLog(fleet) as memory:
        for case in chosen:
            body = case.make(fleet.model)
            for _ in range(2):
                attacks.append(_attack(fleet, case, body, bystanders, memory))
                summary = attacks[-1]
                note(
                    f"{summary.name}: {summary.status}, {summary.seconds:.1f} s, gap "
                    f"{summary.longest_gap_ms:.0f} ms ({summary.quiet_gap_ms:.0f}), growth beyond "
                    f"{summary.beyond_mib:.0f} MiB, kept {summary.most_kept_mib:.0f} MiB"
                )
        num_failed = bystanders.num_failed
    figures = {"cases": [attack.summary() for attack in attacks], "bystanders_failed": num_failed}
    return figures, judge_heavy(attacks, num_failed)


async def warm_up(fleet: AttackedFleet) -> None:
    """Touches all pages of the KV caches, starts all grammar compilers and scores full batches, so
    that this memory is allocated before the measurement."""
    count = 3 * NUM_WORKERS * KV_CACHE_TOKENS // MAX_MODEL_LEN
    length = MAX_MODEL_LEN - 2
    prompts = [
        {"prompt": [(number * 7 + place) % VOCABULARY for place in range(length)], "max_tokens": 1}
        for number in range(count)
    ]
    forms = [
        {"prompt": "hi", "max_tokens": 1, "structured_outputs": {"regex": f"[a-z]{{{number}}}"}}
        for number in range(1, 17)
    ]
    scored = [
        {"prompt": prompts[0]["prompt"], "echo": True, "logprobs": 20, "n": 16, "max_tokens": 1},
        {"prompt": "hi", "logprobs": 20, "n": 128, "max_tokens": 16},
    ]
    fields = (*prompts, *forms, *(4 * scored))
    bodies = [json.dumps({"model": fleet.model, **body}).encode() for body in fields]
    bodies += [b'{"prompt":"' + b"x" * (31 * MIB) + b'"}'] * 2
    bodies += [case.make(fleet.model) for case in heavy_cases() if case.is_wide for _ in range(2)]

    async with open_session(fleet.api_key) as session:

        async def work(body: bytes) -> None:
            await send(session, fleet.base_url, Case(kind="warm-up", path=TEXT, body=body))

        await each(bodies, work, at_once=4, deadline=time.monotonic() + WARM_UP_S)


def _attack(
    fleet: AttackedFleet,
    case: HeavyCase,
    body: bytes,
    bystanders: Bystanders,
    memory: MemoryLog,
) -> Attack:
    memory.refresh()
    time.sleep(1.0)
    since = time.monotonic()
    answer = asyncio.run(_send_one(fleet, Case(kind=case.name, path=case.path, body=body)))
    answered = time.monotonic()
    bystanders.wait_tokens(answered, SETTLE_S)
    memory.refresh()
    while True:
        time.sleep(0.6)
        now = time.monotonic()
        kept = memory.kept(since, now)
        if now - answered > BACK_S or max(kept.values()) <= KEPT_MIB:
            break
    return Attack(
        name=case.name,
        is_form=case.is_form,
        body_mib=len(body) / MIB,
        status=answer.status,
        seconds=answer.seconds,
        problem=problem_of(answer),
        quiet_gap_ms=1000 * bystanders.longest_gap(since - 1.0, since),
        longest_gap_ms=1000 * bystanders.longest_gap(since, now),
        num_tokens=bystanders.num_tokens(since, now),
        growth_mib=memory.growth(since, now),
        kept_mib=kept,
        back_s=now - answered,
    )


async def _send_one(fleet: AttackedFleet, case: Case) -> Answer:
    async with open_session(fleet.api_key) as session:
        return await send(session, fleet.base_url, case, HEAVY_ANSWER_S)


def judge_heavy(attacks: Sequence[Attack], num_failed: int) -> list[Check]:
    """Checks of bystanders and processes."""
    found = [
        Found(kind=attack.name, problem=attack.problem, request="")
        for attack in attacks
        if attack.problem is not None
    ]
    kept = [attack for attack in attacks if attack.is_kept]
    others = [attack for attack in attacks if not attack.is_kept]
    compilers = [attack.growth_mib.get("compiler", 0.0) for attack in attacks]
    return [
        at_least("bodies", len(attacks), "bodies", 2),
        at_most(
            "longest_gap",
            max(attack.longest_gap_ms for attack in attacks),
            "ms",
            BYSTANDER_GAP_MS,
        ),
        at_least("fewest_tokens_beside", min(attack.num_tokens for attack in attacks), "tokens", 1),
        exactly("bystanders_failed", num_failed, "requests", 0),
        at_most(
            "growth_beyond_4_bodies",
            max((attack.beyond_mib for attack in others), default=0.0),
            "MiB",
            SMALL_GROWTH_MIB,
        ),
        at_most(
            "kept", max((attack.most_kept_mib for attack in others), default=0.0), "MiB", KEPT_MIB
        ),
        at_most("form_growth", max((a.most_mib for a in kept), default=0.0), "MiB", FORM_MIB),
        at_most("compiler_growth", max(compilers), "MiB", COMPILER_MIB),
        *judge_found(found),
    ]
