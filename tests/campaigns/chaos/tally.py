"""Classifies answers by outcome, and pauses by the fault during which they occurred."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cluster.bench.report import Result
from cluster.bench.stats import percentile
from tests.campaigns.chaos.answers import Answer, difference
from tests.campaigns.chaos.client import Outcome
from tests.campaigns.chaos.faults import Fault, allowed_pause_s
from tests.campaigns.chaos.kinds import KINDS, Noticed

_SERVER_ERROR = 500
_TELLING = 40
"""Number of leading characters of an error that identify its kind."""


@dataclass(kw_only=True, slots=True)
class Tally:
    """Outcomes of all requests."""

    sent: int = 0
    completed: int = 0
    wrong: list[str] = field(default_factory=list)
    """Differences of answers from the expected ones."""
    failed: list[str] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    """Number of failures by kind of error."""
    examples: dict[str, str] = field(default_factory=dict)
    """First failure of each kind."""
    cut: int = 0
    """Number of requests that ended with the gateway or HAProxy that held the client's
    connection."""
    left: int = 0
    """Number of requests whose client closed the connection."""
    retried: Counter[str] = field(default_factory=Counter)
    """Retries by reason."""
    by_fault: dict[int, Counter[str]] = field(default_factory=dict)
    """Number of failed, wrong and cut requests by index of the preceding fault."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pauses:
    """Longest pause of each stream that was open during a fault, for all faults."""

    lengths: Sequence[float]
    beyond: Sequence[float]
    """Pauses minus the maximum detection time of the fault."""
    of_hung_ranks: Sequence[float]


def tally(
    outcomes: Sequence[Outcome], faults: Sequence[Fault], right: Mapping[int, Answer]
) -> Tally:
    """Counts the outcomes of requests.

    Args:
        outcomes: outcomes of all requests.
        faults: injected faults in order.
        right: expected answers by request index.
    """
    found = Tally(sent=len(outcomes))
    for outcome in outcomes:
        found.retried.update(retry.reason for retry in outcome.retries)
        verdict = _verdict(outcome, faults, right)
        if verdict == "completed":
            found.completed += 1
            continue
        if verdict == "left":
            found.left += 1
            continue
        where = (
            f"{outcome.request.kind} (request {outcome.request.index}) at {outcome.worker or '?'}"
        )
        before = [fault for fault in faults if fault.begin <= outcome.ended]
        if before:
            where = f"{where} {outcome.ended - before[-1].begin:+.1f} s after {before[-1].kind}"
            counts = found.by_fault.setdefault(before[-1].number, Counter())
            counts[verdict] += 1
        if verdict == "cut":
            found.cut += 1
        elif verdict == "failed":
            found.failed.append(f"{where}: {outcome.error}")
            way = outcome.error[:_TELLING]
            found.errors[way] += 1
            found.examples.setdefault(way, found.failed[-1])
        else:
            problem = difference(right[outcome.request.index], outcome.answer)
            found.wrong.append(f"{where}: {problem}")
    return found


def _verdict(outcome: Outcome, faults: Sequence[Fault], right: Mapping[int, Answer]) -> str:
    if outcome.end == "left":
        return "left"
    if outcome.end == "whole":
        is_right = difference(right[outcome.request.index], outcome.answer) is None
        return "completed" if is_right else "wrong"
    return "cut" if is_cut(outcome, faults) else "failed"


def is_cut(outcome: Outcome, faults: Sequence[Fault]) -> bool:
    """Whether the request's connection went through a process that was hit by a fault."""
    if outcome.end != "broken" and outcome.status < _SERVER_ERROR:
        return False
    return any(
        outcome.port in fault.ports and outcome.begun <= fault.begin <= outcome.ended
        for fault in faults
    )


def longest_pauses(outcomes: Sequence[Outcome], fault: Fault, end: float) -> list[float]:
    """Longest pauses of streams that were open between a fault and `end` and finished normally."""
    lengths = []
    for outcome in outcomes:
        if not outcome.request.stream or outcome.end != "whole":
            continue
        if outcome.begun < end and outcome.ended > fault.begin:
            within = [
                pause.length_s
                for pause in outcome.pauses
                if pause.begin < end and pause.begin + pause.length_s > fault.begin
            ]
            lengths.append(max(within, default=0.0))
    return lengths


def all_pauses(
    outcomes: Sequence[Outcome], faults: Sequence[Fault], end: float, step_timeout_s: float
) -> Pauses:
    """Pauses of all faults; `end` is the end of the load, for faults without recovery."""
    lengths: list[float] = []
    beyond: list[float] = []
    hung: list[float] = []
    for fault in faults:
        found = longest_pauses(outcomes, fault, fault.recovered or end)
        allowed = allowed_pause_s(fault, step_timeout_s)
        lengths += found
        beyond += [length - allowed for length in found]
        if KINDS[fault.kind].noticed is Noticed.BY_WATCHDOG:
            hung += found
    return Pauses(lengths=lengths, beyond=beyond, of_hung_ranks=hung)


def _retried_for(outcome: Outcome, fault: Fault, end: float) -> float | None:
    """Seconds for which a request was rejected, starting at its first rejection during a fault."""
    first = next((retry.at for retry in outcome.retries if fault.begin <= retry.at <= end), None)
    return None if first is None else outcome.begun - first


def rows_by_kind(
    outcomes: Sequence[Outcome], faults: Sequence[Fault], counts: Tally, end: float
) -> list[Result]:
    """Effects of the faults, one row per kind."""
    rows = []
    for kind in dict.fromkeys(fault.kind for fault in faults):
        own = [fault for fault in faults if fault.kind == kind]
        pauses = [
            length
            for fault in own
            for length in longest_pauses(outcomes, fault, fault.recovered or end)
        ]
        waits = [
            wait_s
            for fault in own
            for outcome in outcomes
            if (wait_s := _retried_for(outcome, fault, fault.recovered or end)) is not None
        ]
        recoveries = [fault.recovery_s for fault in own if fault.recovery_s is not None]
        noticed = [fault.noticed_s for fault in own if fault.noticed_s is not None]
        ends = sum((counts.by_fault.get(fault.number, Counter()) for fault in own), Counter[str]())
        rows.append(
            {
                "kind": kind,
                "faults": len(own),
                "streams": len(pauses),
                "failed": ends["failed"],
                "wrong": ends["wrong"],
                "cut": ends["cut"],
                "pause_p50_s": percentile(pauses, 50.0),
                "pause_p99_s": percentile(pauses, 99.0),
                "longest_retry_s": max(waits, default=0.0),
                "noticed_s": max(noticed, default=None),
                "recovery_s": max(recoveries, default=None),
            }
        )
    return rows
