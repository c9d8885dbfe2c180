"""`rayfleet bench serve`: benchmarks any OpenAI-compatible endpoint."""

from __future__ import annotations

import json
import math
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from cluster.bench.arrivals import arrival_times
from cluster.bench.client import Request
from cluster.bench.datasets import DatasetOptions, Sample, make_samples
from cluster.bench.load import Load, choose_processes, run_load
from cluster.bench.metrics import MetricOptions, detailed, summarize
from cluster.bench.prompts import UNKNOWN_VOCABULARY, PromptSpace
from cluster.bench.report import Result, note

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
EMBEDDINGS = "/v1/embeddings"
_TOKEN_ID_SERVERS = ("rayfleet", "vllm", "sglang")
"""Values of a model's `owned_by` for servers that support token ID prompts."""
_WARMUP_SEED = 1_000_003
"""Offset added to the seed for warm-up prompts, which must differ from the measured ones."""

_VERSION_S = 5.0
_NO_FLAG: Mapping[str, Any] = {"flag": None}
HEADERS_FLAG: Mapping[str, Any] = {"flag": "--header", "argparse": {"metavar": "KEY=VALUE"}}


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    """Options of a load against an endpoint. Field names are the flags."""

    base_url: str = "http://127.0.0.1:8000"
    """Base URL of the server."""
    task: Literal["generate", "embed"] = "generate"
    """Task of the model: generate text with the API of --endpoint, or embed with /v1/embeddings,
    whose metrics are request_throughput, total_token_throughput and e2el."""
    endpoint: str = COMPLETIONS
    """API to benchmark: completions, chat, or the path of either."""
    model: str | None = None
    """Name of the model; the first one listed by the server if unset."""
    tokenizer: str | None = None
    """Folder with tokenizer.json; by default the model's, if the server reports a local folder."""
    prompt_format: Literal["token-ids", "text"] = "token-ids"
    """Format of prompts: token IDs, with exact lengths, or text, which is always used for chat."""
    api_key: str | None = None
    """API key; defaults to the environment variable OPENAI_API_KEY, which is not visible in the
    process list."""
    headers: tuple[str, ...] = field(default=(), metadata=HEADERS_FLAG)
    """Additional header for each request; may be repeated."""
    dataset: DatasetOptions = field(default_factory=DatasetOptions, metadata=_NO_FLAG)
    """Type of prompts, and lengths of prompts and completions."""
    metrics: MetricOptions = field(default_factory=MetricOptions, metadata=_NO_FLAG)
    """Metrics to report."""
    num_prompts: int = 100
    """Number of requests."""
    num_warmups: int = 0
    """Number of warm-up requests, which are not measured."""
    max_concurrency: int | None = None
    """Maximum number of concurrent requests; unlimited if unset."""
    request_rate: float = math.inf
    """Requests per second; inf sends all requests at once."""
    burstiness: float = 1.0
    """Burstiness of arrivals, the shape of the gamma distribution of intervals: 1 is a Poisson
    process; lower values are burstier."""
    num_processes: int = 0
    """Number of client processes; 0 chooses it based on the load."""
    ignore_eos: bool = False
    """Ignore end-of-sequence tokens, so that all completions have their full length."""
    temperature: float = 0.0
    """Sampling temperature; 0 is greedy."""
    extra_body: str | None = field(default=None, metadata={"argparse": {"metavar": "JSON"}})
    """JSON object to merge into each request."""
    seed: int = 0
    """Seed of prompts and arrivals. Servers cache prompts: use another seed for each load."""
    save_detailed: bool = False
    """Include the times of every request in the result, as required by `bench compare`."""

    def __post_init__(self) -> None:
        if self.endpoint not in (COMPLETIONS, CHAT):
            raise ValueError(f"--endpoint must be {COMPLETIONS} or {CHAT}, got {self.endpoint}")
        if self.num_prompts < 1:
            raise ValueError(f"--num-prompts must be at least 1, got {self.num_prompts}")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ValueError(f"--max-concurrency must be at least 1, got {self.max_concurrency}")
        if self.num_warmups < 0 or self.num_processes < 0:
            raise ValueError(
                "--num-warmups and --num-processes must not be negative, got "
                f"{self.num_warmups} and {self.num_processes}"
            )
        for text in self.headers:
            if "=" not in text:
                raise ValueError(f"--header must be KEY=VALUE, got {text!r}")

    @property
    def path(self) -> str:
        """Path of the benchmarked API."""
        return EMBEDDINGS if self.task == "embed" else self.endpoint

    @property
    def sends_text(self) -> bool:
        """Whether prompts are sent as text."""
        return self.prompt_format == "text" or self.path == CHAT


def run_serve(options: ServeOptions) -> Result:
    """Sends warm-up requests, then the load; returns metrics and settings.

    Raises:
        ValueError: no model or tokenizer is found, or the server is not reachable.
    """
    options, space = resolve(options)
    body = BodyMaker(options, space)
    if options.num_warmups:
        samples = make_samples(
            options.dataset, options.num_warmups, space.vocabulary, options.seed + _WARMUP_SEED
        )
        warm = run_load(load_of(options, [body.request(i, s) for i, s in enumerate(samples)]), 1)
        if all(record.error for record in warm.records):
            raise ValueError(f"all warm-up requests failed: {warm.records[0].error}")
    samples = make_samples(options.dataset, options.num_prompts, space.vocabulary, options.seed)
    times = arrival_times(len(samples), options.request_rate, options.burstiness, options.seed)
    requests = [
        replace(body.request(index, sample), arrival_s=time)
        for index, (sample, time) in enumerate(zip(samples, times, strict=True))
    ]
    longest = max(sample.output_len for sample in samples)
    num_processes = options.num_processes or choose_processes(
        len(requests), longest, options.max_concurrency, options.request_rate
    )
    result = run_load(load_of(options, requests), num_processes)
    summary = summarize(result, options.metrics, fixed_output=options.ignore_eos)
    details = detailed(result.records) if options.save_detailed else {}
    return {**load_setting(options), "num_prompts": options.num_prompts, **summary, **details}


def resolve(options: ServeOptions) -> tuple[ServeOptions, PromptSpace]:
    """Returns the options, with the model and tokenizer from the server's list of models, and the
    loaded tokenizer. Raises ValueError if there is no model, or if prompts cannot be generated."""
    card = model_card(options)
    model = options.model or card.get("id")
    if model is None:
        raise ValueError(f"{options.base_url} lists no model: set --model")
    tokenizer = options.tokenizer
    if tokenizer is None:
        for folder in (model, card.get("root")):
            if folder and (Path(folder) / "tokenizer.json").is_file():
                tokenizer = folder
                break
    if tokenizer is None and not options.sends_text:
        _check_token_ids(options, card)
    return replace(options, model=model, tokenizer=tokenizer), PromptSpace.load(tokenizer)


def _check_token_ids(options: ServeOptions, card: Mapping[str, Any]) -> None:
    """Reports the token IDs that are used if there is no tokenizer.

    Raises:
        ValueError: the server is not known to support token ID prompts.
    """
    owner = str(card.get("owned_by", "")).lower()
    if owner not in _TOKEN_ID_SERVERS:
        raise ValueError(
            f"{options.base_url} (owned_by: {owner or 'none'}) is not known to support token ID "
            f"prompts, unlike {', '.join(_TOKEN_ID_SERVERS)}: set --tokenizer to a folder with the "
            "model's tokenizer.json, and --prompt-format text unless the server supports token IDs"
        )
    note(
        f"no tokenizer found: using token IDs {UNKNOWN_VOCABULARY.start} to "
        f"{UNKNOWN_VOCABULARY.stop - 1} for prompts; set --tokenizer to use the whole vocabulary"
    )


class BodyMaker:
    """Encodes samples as requests, before the load starts.

    Args:
        options: options returned by `resolve`.
        space: tokenizer for text prompts.
    """

    def __init__(self, options: ServeOptions, space: PromptSpace) -> None:
        self._path = options.path
        self._as_text = options.sends_text
        self._space = space
        self._fields: dict[str, Any] = {"model": options.model}
        if self._path == EMBEDDINGS:
            self._fields["encoding_format"] = "base64"
        else:
            self._fields |= {
                "temperature": options.temperature,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        if options.ignore_eos:
            self._fields["ignore_eos"] = True
        if options.extra_body:
            self._fields.update(json.loads(options.extra_body))

    def request(
        self, index: int, sample: Sample, extra: Mapping[str, Any] | None = None
    ) -> Request:
        """Request for a sample, with `extra` fields in its body."""
        ids, output_len = sample.prompt_token_ids, sample.output_len
        prompt = self._space.as_text(ids) if self._as_text else ids
        body: dict[str, Any]
        if self._path == EMBEDDINGS:
            body, output_len = {"input": prompt}, 0
        elif self._path == CHAT:
            body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": output_len}
        else:
            body = {"prompt": prompt, "max_tokens": output_len}
        return Request(
            index=index,
            body=json.dumps({**self._fields, **body, **(extra or {})}).encode(),
            prompt_len=len(ids),
            output_len=output_len,
            is_streamed=self._path != EMBEDDINGS,
        )


def load_of(options: ServeOptions, requests: Sequence[Request]) -> Load:
    """A load that sends the given requests to the endpoint of the options."""
    return Load(
        url=options.base_url.rstrip("/") + options.path,
        headers=request_headers(options),
        requests=tuple(requests),
        max_concurrency=options.max_concurrency,
    )


def request_headers(options: ServeOptions) -> dict[str, str]:
    """Headers of all requests, with the API key."""
    headers = {key: value for key, _, value in (h.partition("=") for h in options.headers)}
    if options.api_key:
        headers["Authorization"] = f"Bearer {options.api_key}"
    return headers


def server_version(options: ServeOptions) -> str | None:
    """Server version from GET /version, supported by vLLM and rayfleet; None if it is not
    available."""
    request = urllib.request.Request(
        options.base_url.rstrip("/") + "/version", headers=request_headers(options)
    )
    try:
        with urllib.request.urlopen(request, timeout=_VERSION_S) as response:
            return str(json.load(response)["version"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def model_card(options: ServeOptions) -> dict[str, Any]:
    """The server's /v1/models entry for the model, or its first entry; empty if there is none.

    Raises:
        ValueError: the server is not reachable, or returns an HTTP error.
    """
    url = options.base_url.rstrip("/") + "/v1/models"
    request = urllib.request.Request(url, headers=request_headers(options))
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            cards = json.load(response).get("data", [])
    except urllib.error.HTTPError as error:
        if options.model is not None and error.code == 404:
            return {}
        raise ValueError(
            f"{url} returned HTTP {error.code}: check --base-url and --api-key"
        ) from error
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise ValueError(f"cannot connect to {options.base_url}: {reason}") from error
    matching = [card for card in cards if card.get("id") == options.model]
    return dict((matching or cards or [{}])[0])


def load_setting(options: ServeOptions) -> Result:
    """Settings of a load for its result, without API key and headers, which may be secret."""
    return {
        "model_id": options.model,
        "tokenizer_id": options.tokenizer,
        "base_url": options.base_url,
        "endpoint": options.path,
        "prompt_format": "text" if options.sends_text else "token-ids",
        **_dataset(options.dataset),
        "request_rate": _json_number(options.request_rate),
        "burstiness": _json_number(options.burstiness),
        "max_concurrency": options.max_concurrency,
        "ignore_eos": options.ignore_eos,
        "temperature": options.temperature,
        "extra_body": options.extra_body,
        "seed": options.seed,
    }


def _dataset(options: DatasetOptions) -> Result:
    """Options of the selected dataset."""
    return {
        name: value
        for name, value in asdict(options).items()
        if name.startswith(("dataset_name", options.dataset_name))
    }


def _json_number(value: float) -> float | str:
    """The number, or "inf", since JSON has no infinity."""
    return value if math.isfinite(value) else "inf"
