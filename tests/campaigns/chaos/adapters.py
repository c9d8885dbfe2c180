"""LoRA adapters are loaded, replaced and unloaded under load, while processes are killed."""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from cluster.bench.report import Check, Result, at_least, checks_json, exactly, note
from cluster.bench.stats import percentile
from cluster.config import EndpointConfig, ServeConfig, find_demo_model
from cluster.launch import LocalFleet
from tests.campaigns.chaos.adapter_history import (
    AdapterHistory,
    AdapterTally,
    Right,
    tally_adapters,
)
from tests.campaigns.chaos.adapter_operator import (
    ADMIN_KEY,
    BASE,
    KINDS_OF_CHANGE,
    STATIC,
    Operator,
)
from tests.campaigns.chaos.answers import Answer, difference
from tests.campaigns.chaos.campaign import Run, reference, sabotage, wait_empty
from tests.campaigns.chaos.fleet import FleetWatch, serve_config
from tests.campaigns.chaos.load import ChaosLoad, answers_of
from tests.campaigns.chaos.options import ChaosOptions
from tests.campaigns.chaos.planned_requests import MODEL, PlannedRequest
from worker.protocol.options import from_options, option_values

FAULTS: Final = ("kill-gateway", "kill-front", "kill-rank0")
"""Default kinds of fault: a gateway, a worker, and a worker's ranks."""
PROMPTS: Final = 3
"""Requests per name, with different prompts: a long stream, a short stream and a short body."""
_SLOTS: Final = {"max_loras": 2, "max_cpu_loras": 3}
"""Number of slots: fewer than adapters, so that adapters are evicted and read again."""
_RANKS: Final = (4, 16, 8)
_EXTRA: Final = 2
"""Number of folders in excess of names."""
_SHORTER: Final = 4
"""Factor by which short answers are shorter than long ones."""
_LOOKS: Final = 4
"""Number of times that each gateway's list of adapters is requested, on average."""
_MAX_EXAMPLES: Final = 20


def run_adapters(options: ChaosOptions) -> Result:
    """Starts a fleet, changes adapters and injects faults until the time is over."""
    options = replace(options, faults=options.faults or FAULTS)
    names = [f"adapter-{number}" for number in range(options.adapters)]
    with tempfile.TemporaryDirectory() as directory:
        folders = _write_folders(options, Path(directory))
        config = _with_adapters(serve_config(options), folders)
        with LocalFleet(config, report=note) as fleet:
            history = AdapterHistory({MODEL: BASE, STATIC: "0", **dict.fromkeys(names)})
            with Operator(fleet.base_url, folders, history, options.seed) as operator:
                right = _references(operator, names, options)
                note(f"{len(right)} requests have their expected answers")
                watch = FleetWatch(fleet.base_url, config)
                requests = list_adapter_requests(names, options.output_len)
                run = Run()
                cycle = itertools.cycle(requests)
                with ChaosLoad(fleet.base_url, cycle, options.num_streams) as load:
                    operator.start(names)
                    sabotage(run, watch, load, options)
                    operator.stop()
                    run.outcomes = load.stop()
                run.end = time.monotonic()
                run.outcomes += answers_of(fleet.base_url, requests, options.num_streams)
                wait_empty(run, watch)
                looks = _LOOKS * options.num_gateways
                differing = operator.differing(names, looks)
    counts = tally_adapters(run.outcomes, run.faults, history, right, PROMPTS)
    return _result(run, counts, operator, differing)


def list_adapter_requests(names: Sequence[str], output_len: int) -> list[PlannedRequest]:
    """All requests for the base model, the configured adapter and `names`. All of these have the
    same prompts, which must not share a prefix cache.

    Args:
        names: names of adapters.
        output_len: tokens of the long answers.
    """
    requests: list[PlannedRequest] = []
    for name, prompt in itertools.product((MODEL, STATIC, *names), range(PROMPTS)):
        body = {
            "model": name,
            "prompt": f"{prompt}: what do the people of the town do all day? " * 4,
            "max_tokens": output_len if prompt == 0 else output_len // _SHORTER,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": prompt != PROMPTS - 1,
            "return_token_ids": True,
        }
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        requests.append(
            PlannedRequest(
                index=len(requests),
                kind=name,
                path="/v1/completions",
                body=json.dumps(body).encode(),
                stream=bool(body["stream"]),
            )
        )
    return requests


def _write_folders(options: ChaosOptions, directory: Path) -> dict[str, Path]:
    # Imports torch, which the other campaigns do not need.
    from tests.support.checkpoints.adapters import write_adapter

    base = Path(options.model or find_demo_model())
    return {
        str(number): write_adapter(
            base, directory / str(number), _RANKS[number % len(_RANKS)], seed=number
        )
        for number in range(options.adapters + _EXTRA)
    }


def _with_adapters(config: ServeConfig, folders: Mapping[str, Path]) -> ServeConfig:
    """The same fleet with LoRA adapters and an admin key."""
    (model,) = config.models
    modules = (f"{STATIC}={folders['0']}",)
    engine = model.engine.with_options(enable_lora=True, lora_modules=modules, **_SLOTS)
    endpoint = option_values(config.endpoint) | {"admin_api_key": ADMIN_KEY}
    return ServeConfig(
        endpoint=from_options(EndpointConfig, endpoint), models=(replace(model, engine=engine),)
    )


def _references(operator: Operator, names: Sequence[str], options: ChaosOptions) -> Right:
    """Expected answers, from the weights of one folder after another. Leaves no adapter loaded.

    Raises:
        RuntimeError: a change or request failed, or two adapters give the same answer.
    """
    first = names[0]
    requests = list_adapter_requests(names, options.output_len)
    right: dict[tuple[str, int], Answer] = {}
    for weights, name in [(BASE, MODEL), *((key, first) for key in operator.keys)]:
        if name == first:
            operator.change(name, weights)
        own = [request for request in requests if request.kind == name]
        answers = reference(operator.base_url, own, len(own))
        right |= {(weights, index % PROMPTS): answer for index, answer in answers.items()}
    operator.change(first, None)
    if operator.problems:
        raise RuntimeError(f"failed without a fault: {operator.problems[0]}")
    for (one, answer), (other, same) in itertools.combinations(right.items(), 2):
        if one[1] == other[1] and difference(answer, same) is None:
            raise RuntimeError(f"the weights {one[0]} and {other[0]} give the same answer")
    return right


def _result(run: Run, counts: AdapterTally, operator: Operator, differing: Sequence[str]) -> Result:
    checks = judge_adapters(run, counts, operator, differing)
    recoveries = [fault.recovery_s for fault in run.faults if fault.recovery_s is not None]
    return {
        "faults": dict(Counter(fault.kind for fault in run.faults)),
        "sent": len(run.outcomes),
        "completed": counts.counts["completed"],
        "not_loaded": counts.counts["not_loaded"],
        "cut_with_their_gateway": counts.counts["cut"],
        "failed": len(counts.failed),
        "wrong": len(counts.wrong),
        "retried": dict(Counter(retry.reason for o in run.outcomes for retry in o.retries)),
        "changes": dict(operator.changes),
        "changes_retried": dict(operator.retries),
        "slowest_change_s": operator.slowest_s,
        "longest_recovery_s": max(recoveries, default=None),
        "load_average_p50": percentile(run.load_average, 50.0),
        "not_run": run.not_run,
        "left_over": run.left_over,
        "first_failures": counts.failed[:_MAX_EXAMPLES],
        "first_wrong": counts.wrong[:_MAX_EXAMPLES],
        "failed_changes": operator.problems[:_MAX_EXAMPLES],
        "differing_gateways": list(differing[:_MAX_EXAMPLES]),
        "problems": [f"{fault.kind}: {fault.problem}" for fault in run.faults if fault.problem],
        "broken": [check.name for check in checks if not check.holds],
        "checks": checks_json(checks),
    }


def judge_adapters(
    run: Run, counts: AdapterTally, operator: Operator, differing: Sequence[str]
) -> list[Check]:
    """Checks of a run.

    Args:
        run: faults, and what remained in the fleet afterwards.
        counts: outcomes of the requests.
        operator: changes of adapters.
        differing: lists of adapters of gateways that differ from the operator's.
    """
    num_lost = sum(fault.recovered is None for fault in run.faults)
    return [
        at_least("faults", len(run.faults), "faults", 1),
        at_least("completed", counts.counts["completed"], "requests", 1),
        exactly("failed", len(counts.failed), "requests", 0),
        exactly("wrong", len(counts.wrong), "requests", 0),
        *(at_least(f"{kind}s", operator.changes[kind], "changes", 1) for kind in KINDS_OF_CHANGE),
        exactly("failed_changes", len(operator.problems), "changes", 0),
        exactly("differing_gateways", len(differing), "lists", 0),
        exactly("not_recovered", num_lost, "faults", 0),
        exactly("leaked", len(run.left_over), "gauges", 0),
        exactly("extra_processes", run.extra_processes, "processes", 0),
    ]
