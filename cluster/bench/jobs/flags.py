"""Command-line flags of `rayfleet bench job` and `rayfleet bench compare`."""

from __future__ import annotations

import argparse
import secrets
from typing import get_args

from cluster.bench.command import AddCommand
from cluster.bench.compare import CompareOptions, run_compare
from cluster.bench.flags import add_load_flags, serve_options
from cluster.bench.jobs.options import JobKind, JobOptions
from cluster.bench.report import Result
from cluster.cli.options import add_options, given_options

_OF_STAGES = (
    "num_prompts",
    "num_warmups",
    "num_processes",
    "request_rate",
    "burstiness",
    "metrics",
    "save_detailed",
)
"""Load options that have no flag, since the stages of a job set them."""
_OF_COMPARISONS = ("base_url", "max_concurrency", "metrics", "save_detailed")
"""Load options that have no flag, since a comparison of endpoints sets them."""


def add_job_commands(add: AddCommand) -> None:
    """Adds `job` and `compare` to the bench commands."""
    job = add("job", "run a benchmark job on any endpoint and write a report", _job)
    job.add_argument("kind", choices=get_args(JobKind), help="type of job")
    add_options(job.add_argument_group("job"), JobOptions, exclude=("kind",))
    add_load_flags(job, exclude=_OF_STAGES)
    compare = add("compare", "compare two results or endpoints statistically", _compare)
    source = "result file, folder of results of several runs, or URL of an endpoint"
    compare.add_argument("a", help=f"baseline: {source}")
    compare.add_argument("b", help=f"compared with A: {source}")
    add_options(compare, CompareOptions, exclude=("a", "b"))
    add_load_flags(compare, exclude=_OF_COMPARISONS)


def _job(args: argparse.Namespace) -> Result:
    from cluster.bench.jobs.run import run_job

    if not hasattr(args, "seed"):  # new prompts, which are in no prefix cache
        args.seed = secrets.randbelow(2**31)
    return run_job(JobOptions(**given_options(args, JobOptions)), serve_options(args))


def _compare(args: argparse.Namespace) -> Result:
    options = CompareOptions(**given_options(args, CompareOptions))
    return run_compare(options, serve_options(args))
