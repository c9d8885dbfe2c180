"""Command-line flags of `rayfleet bench job` and `rayfleet bench compare`."""

from __future__ import annotations

import argparse
import math
import secrets
from typing import get_args

from cluster.bench.command import AddCommand
from cluster.bench.compare import CompareOptions, run_compare
from cluster.bench.flags import add_dataset_flags, add_target_flags, serve_options
from cluster.bench.jobs.options import JobKind, JobOptions
from cluster.bench.metrics import METRICS
from cluster.bench.report import Result
from cluster.cli.options import add_options, given_options


def add_job_commands(add: AddCommand) -> None:
    """Adds `job` and `compare` to the bench commands."""
    job = add("job", "stages of load on any endpoint, with a report", _job)
    job.add_argument("kind", choices=get_args(JobKind), help="which job")
    add_options(job.add_argument_group("job"), JobOptions, exclude=("kind",))
    job.add_argument("--base-url", default="http://127.0.0.1:8000")
    add_target_flags(job.add_argument_group("requests"))
    add_dataset_flags(job.add_argument_group("prompts"), count=False, seed=None)
    job.add_argument("--max-concurrency", type=int, help="most requests at once")
    # A job's stages say how many requests there are, and when.
    job.set_defaults(
        num_prompts=1,
        num_warmups=0,
        num_processes=0,
        request_rate=math.inf,
        burstiness=1.0,
        goodput=[],
        percentile_metrics=",".join(METRICS),
        metric_percentiles="50,90,99",
    )
    compare = add("compare", "two results, with confidence intervals", _compare)
    compare.add_argument("a", help="result file, or a folder of several runs: what was before")
    compare.add_argument("b", help="the same of what is now")
    add_options(compare, CompareOptions, exclude=("a", "b"))


def _job(args: argparse.Namespace) -> Result:
    from cluster.bench.jobs.run import run_job

    if args.seed is None:
        args.seed = secrets.randbelow(2**31)
    return run_job(JobOptions(**given_options(args, JobOptions)), serve_options(args))


def _compare(args: argparse.Namespace) -> Result:
    return run_compare(CompareOptions(**given_options(args, CompareOptions)))
