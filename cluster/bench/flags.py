"""Command-line flags of the load benchmarks, and options from them."""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import fields

from cluster.bench.datasets import DatasetOptions
from cluster.bench.metrics import METRICS, MetricOptions
from cluster.bench.serve import CHAT, COMPLETIONS, ServeOptions

_ENDPOINTS = {"completions": COMPLETIONS, "chat": CHAT}


def add_load_flags(parser: argparse.ArgumentParser) -> None:
    """Everything that describes a load, besides where it goes."""
    add_target_flags(parser.add_argument_group("requests"))
    _add_pace_flags(parser.add_argument_group("pace"))
    add_dataset_flags(parser.add_argument_group("prompts"))
    _add_metric_flags(parser.add_argument_group("metrics"))


def add_dataset_flags(
    group: argparse._ArgumentGroup, *, count: bool = True, seed: int | None = 0
) -> None:
    """The fields of DatasetOptions, by vLLM's names; --input-len and --output-len are short.

    `count` says whether there is a flag for the number of requests, `seed` is the default one, None
    where the caller draws it.
    """
    defaults = DatasetOptions()
    group.add_argument(
        "--dataset-name",
        choices=("random", "prefix_repetition"),
        default=defaults.dataset_name,
        help="random tokens, or prompts that share prefixes",
    )
    for name in (f.name for f in fields(DatasetOptions) if f.name != "dataset_name"):
        default = getattr(defaults, name)
        flags = ["--" + name.replace("_", "-")]
        if name in ("random_input_len", "random_output_len"):
            flags.append("--" + name.removeprefix("random_").replace("_", "-"))
        group.add_argument(
            *flags, dest=name, type=type(default), default=default, help=f"default {default}"
        )
    if count:
        group.add_argument("--num-prompts", type=int, default=100, help="requests (default 100)")
    usual = "a new one each time: no cache knows the prompts" if seed is None else seed
    group.add_argument(
        "--seed", type=int, default=seed, help=f"of prompts and arrivals (default: {usual})"
    )


def dataset_options(args: argparse.Namespace) -> DatasetOptions:
    """DatasetOptions from parsed flags."""
    return DatasetOptions(**{f.name: getattr(args, f.name) for f in fields(DatasetOptions)})


def serve_options(args: argparse.Namespace) -> ServeOptions:
    """ServeOptions from parsed flags. Raises ValueError where a value is out of range."""
    return ServeOptions(
        base_url=args.base_url,
        endpoint=_ENDPOINTS.get(args.endpoint, args.endpoint),
        model=args.model,
        tokenizer=args.tokenizer,
        text_prompts=args.prompt_format == "text",
        api_key=args.api_key or os.environ.get("OPENAI_API_KEY"),
        headers=tuple(_header(text) for text in args.header),
        dataset=dataset_options(args),
        metrics=MetricOptions(
            percentile_metrics=tuple(args.percentile_metrics.split(",")),
            metric_percentiles=tuple(float(q) for q in args.metric_percentiles.split(",")),
            goodput=_goodput(args.goodput),
        ),
        num_prompts=args.num_prompts,
        num_warmups=args.num_warmups,
        max_concurrency=args.max_concurrency,
        request_rate=args.request_rate,
        burstiness=args.burstiness,
        num_processes=args.num_processes,
        ignore_eos=args.ignore_eos,
        temperature=args.temperature,
        extra_body=args.extra_body,
        seed=args.seed,
        save_detailed=getattr(args, "save_detailed", False),
    )


def add_versus_flags(parser: argparse.ArgumentParser) -> None:
    """Which endpoints `bench versus` compares, where and how often."""
    parser.add_argument("--a", required=True, metavar="URL", help="one endpoint")
    parser.add_argument("--b", required=True, metavar="URL", help="the baseline; ratios are a / b")
    parser.add_argument("--b-model", help="model name at b, where it differs")
    parser.add_argument("--b-api-key", help="key for b, where it differs")
    parser.add_argument("--concurrencies", default="1,8,32", help="default 1,8,32")
    parser.add_argument("--rounds", type=int, default=3, help="at least 3 (default)")
    parser.add_argument(
        "--pause-s", type=float, default=2.0, help="before each measurement (default: 2)"
    )
    parser.add_argument(
        "--prompts-per-stream",
        type=int,
        default=0,
        help="requests of a cell are this many times its concurrency; default: --num-prompts",
    )
    parser.add_argument(
        "--metric", default="output_throughput", help="result field to compare; more is better"
    )


def add_target_flags(group: argparse._ArgumentGroup) -> None:
    """Which model and endpoint, and how requests are written."""
    group.add_argument("--model", help="model name; default: the server's first")
    group.add_argument("--tokenizer", help="folder with tokenizer.json; default: the model's own")
    group.add_argument(
        "--endpoint",
        default="completions",
        help=f"completions ({COMPLETIONS}, default) or chat ({CHAT})",
    )
    group.add_argument(
        "--prompt-format",
        choices=("token-ids", "text"),
        default="token-ids",
        help="send prompts as token ids, of exact length, or as text (chat always does)",
    )
    group.add_argument(
        "--api-key",
        help="default: the environment's OPENAI_API_KEY, which no process list shows",
    )
    group.add_argument(
        "--header", action="append", default=[], metavar="KEY=VALUE", help="repeatable"
    )
    group.add_argument("--ignore-eos", action="store_true", help="generate the full length")
    group.add_argument("--temperature", type=float, default=0.0, help="default 0: greedy")
    group.add_argument("--extra-body", metavar="JSON", help="merged into every request")


def _add_pace_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--max-concurrency", type=int, help="most requests at once")
    group.add_argument(
        "--request-rate", type=float, default=math.inf, help="per second; default inf: all at once"
    )
    group.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        help="shape of the gamma distributed gaps; 1 (default) is Poisson, less is burstier",
    )
    group.add_argument("--num-warmups", type=int, default=0, help="unmeasured requests before")
    group.add_argument(
        "--num-processes", type=int, default=0, help="of the client; default 0: as the load needs"
    )


def _add_metric_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="METRIC:MS",
        help="a good request keeps all of these, as in ttft:500 tpot:50 e2el:5000",
    )
    group.add_argument(
        "--percentile-metrics", default=",".join(METRICS), help=f"default {','.join(METRICS)}"
    )
    group.add_argument("--metric-percentiles", default="50,90,99", help="default 50,90,99")


def _header(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator:
        raise ValueError(f"--header needs KEY=VALUE, got {text!r}")
    return key, value


def _goodput(pairs: list[str]) -> dict[str, float] | None:
    goals: dict[str, float] = {}
    for pair in pairs:
        name, _, value = pair.partition(":")
        try:
            goals[name] = float(value)
        except ValueError:
            raise ValueError(f"--goodput needs METRIC:MS, as in ttft:500, got {pair!r}") from None
    return goals or None
