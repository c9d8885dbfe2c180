"""Cases that clients try on an endpoint, and what came of each; with the standard library alone."""

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
"""Of one request, on whatever machine."""


class Endpoint(NamedTuple):
    """What is tried."""

    base_url: str
    """Without /v1."""
    model: str
    key: str


class Outcome(NamedTuple):
    """What came of one case."""

    name: str
    verdict: Literal["passed", "failed", "skipped"]
    text: str = ""
    """Why it failed or was skipped."""


Case = Callable[[Endpoint], None]
"""Raises where the endpoint does otherwise than the client expects."""


def try_cases(
    group: str, cases: Mapping[str, Case], skipped: Mapping[str, str], endpoint: Endpoint
) -> Iterator[Outcome]:
    """One after another.

    Args:
        group: what their names begin with.
        cases: by name.
        skipped: the reason, by name of what is not tried.
        endpoint: that they are tried on.
    """
    for name, case in cases.items():
        try:
            case(endpoint)
        except Exception as error:  # clients raise what they like
            frame = traceback.extract_tb(error.__traceback__)
            ours = [f"line {step.lineno}" for step in frame if step.filename.endswith(".py")][:2]
            text = f"{type(error).__name__}: {error}"[:600]
            yield Outcome(f"{group}: {name}", "failed", f"{' '.join(ours)}: {text}")
        else:
            yield Outcome(f"{group}: {name}", "passed")
    for name, reason in skipped.items():
        yield Outcome(f"{group}: {name}", "skipped", reason)


def raised(kind: type[Exception], call: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """The error of that kind which a call raises. AssertionError where it raises none."""
    try:
        call(*given, **named)
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__} for {named}")


def main(try_all: Callable[[Endpoint], Iterator[Outcome]]) -> int:
    """A program of its own, in an environment that has other versions of clients than this project.

    Its argument is the endpoint as JSON; it prints a JSON list of outcomes.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("endpoint", type=lambda text: Endpoint(*json.loads(text)))
    endpoint = parser.parse_args().endpoint
    with contextlib.redirect_stdout(sys.stderr):  # some clients print
        outcomes = list(try_all(endpoint))
    json.dump(outcomes, sys.stdout)
    return 0


def outcomes_of(python: Path, module: str, endpoint: Endpoint) -> list[Outcome]:
    """What a program of `main`'s kind tells.

    Args:
        python: of the environment that it runs in.
        module: name of the program.
        endpoint: that it tries.

    Raises:
        CalledProcessError: it did not come to its end.
    """
    command = [str(python), "-m", module, json.dumps(endpoint)]
    # Nothing is asked of other hosts, which clients do of their own accord.
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=True)
    return [Outcome(*fields) for fields in json.loads(done.stdout)]
