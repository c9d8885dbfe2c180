"""Cases that client libraries run against an endpoint, and their outcomes. Uses only the standard
library."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tests.support.paths import ROOT

TIMEOUT_S = 600.0
"""Timeout of one request in seconds, even on slow machines."""


class Endpoint(NamedTuple):
    """The endpoint under test."""

    base_url: str
    """URL of the endpoint without /v1."""
    model: str
    key: str


class Outcome(NamedTuple):
    """Outcome of one case."""

    name: str
    verdict: Literal["passed", "failed", "skipped"]
    text: str = ""
    """Reason for the failure or skip."""


Case = Callable[[Endpoint], None]
"""Raises an exception if the endpoint violates the client's expectations."""


def try_cases(
    group: str, cases: Mapping[str, Case], skipped: Mapping[str, str], endpoint: Endpoint
) -> Iterator[Outcome]:
    """Runs the cases in sequence.

    Args:
        group: prefix of their names.
        cases: cases, keyed by name.
        skipped: reasons for omitted cases, keyed by name.
        endpoint: the endpoint under test.
    """
    for name, case in cases.items():
        try:
            case(endpoint)
        except Exception as error:  # clients raise various types
            frame = traceback.extract_tb(error.__traceback__)
            ours = [f"line {step.lineno}" for step in frame if step.filename.endswith(".py")][:2]
            text = f"{type(error).__name__}: {error}"[:600]
            yield Outcome(f"{group}: {name}", "failed", f"{' '.join(ours)}: {text}")
        else:
            yield Outcome(f"{group}: {name}", "passed")
    for name, reason in skipped.items():
        yield Outcome(f"{group}: {name}", "skipped", reason)


def raised(kind: type[Exception], call: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Returns the error of type `kind` that a call raises; raises AssertionError if there is
    none."""
    try:
        call(*given, **named)
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__} for {named}")


def main(try_all: Callable[[Endpoint], Iterator[Outcome]]) -> int:
    """Entry point of a program in a separate environment with other client versions. The argument
    is the endpoint as JSON; prints a JSON list of outcomes."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("endpoint", type=lambda text: Endpoint(*json.loads(text)))
    endpoint = parser.parse_args().endpoint
    with contextlib.redirect_stdout(sys.stderr):  # some clients print
        outcomes = list(try_all(endpoint))
    json.dump(outcomes, sys.stdout)
    return 0


def outcomes_of(python: Path, module: str, endpoint: Endpoint) -> list[Outcome]:
    """Outcomes printed by a program whose entry point is `main`.

    Args:
        python: Python interpreter of its environment.
        module: name of the program.
        endpoint: the endpoint under test.

    Raises:
        CalledProcessError: the program failed.
    """
    command = [str(python), "-m", module, json.dumps(endpoint)]
    # Prevents requests to other hosts, which some clients send by default.
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=True)
    return [Outcome(*fields) for fields in json.loads(done.stdout)]
