"""Runs Schemathesis on /openapi.json: generates requests, and checks that responses conform."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.campaigns.conformance.cases import TIMEOUT_S, Endpoint
from tests.support.paths import ROOT

HOOKS = "tests.campaigns.conformance.schemathesis_hooks"
UNCHECKED = {
    "positive_data_acceptance": "bounds that depend on the model are not in the document",
}
"""Disabled checks, with the reason."""


class Report(NamedTuple):
    """Result of one run."""

    num_cases: int
    accepted: int
    """Number of cases with a 2xx response."""
    failures: dict[str, int]
    """Number of cases by failed check."""
    errors: list[str]
    """Errors that prevented Schemathesis from running cases."""


def report_of(found: Mapping[str, Any]) -> Report:
    """Parses Schemathesis' report."""
    rates = [rate for phases in found["valid_rates"].values() for rate in phases.values()]
    failures: dict[str, int] = {}
    for one in found["failures"]:
        failures[one["title"]] = failures.get(one["title"], 0) + one["count"]
    errors = [f"{error['title']}: {error['count']}" for error in found["errors"]]
    if not found["complete"]:
        errors.append("it has not come to its end")
    return Report(
        num_cases=found["test_cases"]["generated"],
        accepted=sum(rate["accepted"] for rate in rates),
        failures=failures,
        errors=errors,
    )


def try_document(program: Path, endpoint: Endpoint, *, num_examples: int, seed: int) -> Report:
    """Generates requests for each operation; failures are printed to standard error.

    Args:
        program: Schemathesis' executable.
        endpoint: the endpoint under test.
        num_examples: maximum random requests per operation, in addition to boundary values.
        seed: seed of the random requests.
    """
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "report.json"
        command = [str(program), "run", f"{endpoint.base_url}/openapi.json", "--report", "json"]
        command += ["--report-json-path", str(path), "--seed", str(seed), "--no-color"]
        command += ["--max-examples", str(num_examples), "--continue-on-failure", "--no-shrink"]
        command += ["--header", f"Authorization: Bearer {endpoint.key}"]
        command += ["--phases", "examples,coverage,fuzzing", "--workers", "4"]
        command += ["--request-timeout", f"{TIMEOUT_S:.0f}", "--output-sanitize", "false"]
        command += ["--exclude-checks", ",".join(UNCHECKED)]
        environment = {**os.environ, "SCHEMATHESIS_HOOKS": HOOKS, "PYTHONPATH": str(ROOT)}
        environment |= {"CONFORMANCE_MODEL": endpoint.model, "NO_PROXY": "127.0.0.1"}
        subprocess.run(
            command, cwd=directory, env=environment, stdout=sys.stderr, check=False
        )  # the exit status is 1 if a case failed, which the report shows
        return report_of(json.loads(path.read_text()))
