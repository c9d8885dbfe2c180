"""Stages of each type of job: named loads with their requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from cluster.bench.arrivals import arrival_times
from cluster.bench.client import Request
from cluster.bench.datasets import DatasetOptions, Sample, make_samples
from cluster.bench.jobs.options import JobOptions
from cluster.bench.jobs.scenario_options import SCENARIOS
from cluster.bench.jobs.traffic import DEFAULT_PRIORITY, make_traffic, offered
from cluster.bench.prompts import PromptSpace
from cluster.bench.serve import BodyMaker, ServeOptions
from cluster.bench.traces import TraceFile, trace_requests

_MIN_REQUESTS = 8
"""Minimum number of requests of a stage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A stage of a benchmark job: a load with a name."""

    label: str
    rate: float
    """Mean requests per second."""
    requests: tuple[Request, ...]


class StageMaker:
    """Builder of stages for one endpoint. Each stage has new prompts, which are in no prefix cache,
    except for traces and the shared prefixes of scenarios.

    Args:
        options: options of the job.
        serve: options of the load, returned by `resolve`.
        space: tokens of prompts.
    """

    def __init__(self, options: JobOptions, serve: ServeOptions, space: PromptSpace) -> None:
        self._options = options
        self._serve = serve
        self._vocabulary = space.vocabulary
        self._bodies = BodyMaker(serve, space)
        self._num_stages = 0

    def at_rate(self, rate: float) -> Stage:
        """Stage with the load's dataset at a rate in requests per second."""
        return self._poisson(f"{rate:g} req/s", rate, self._serve.dataset)

    def fixed(self) -> Iterator[Stage]:
        """Stages of jobs with fixed rates."""
        options = self._options
        if options.kind == "mooncake":
            yield self._trace()
        elif options.kind == "scenario":
            yield from self._scenarios()
        elif options.kind == "shared-prefix":
            yield from self._shared_prefix()
        else:
            yield self.at_rate(options.rate)

    def _shared_prefix(self) -> Iterator[Stage]:
        shared = replace(self._serve.dataset, dataset_name="prefix_repetition")
        length = shared.prefix_repetition_prefix_len + shared.prefix_repetition_suffix_len
        unshared = DatasetOptions(
            random_input_len=length, random_output_len=shared.prefix_repetition_output_len
        )
        yield self._poisson("shared prefixes", self._options.rate, shared)
        yield self._poisson("no shared prefixes", self._options.rate, unshared)

    def _poisson(self, label: str, rate: float, dataset: DatasetOptions) -> Stage:
        seed = self._next_seed()
        count = max(_MIN_REQUESTS, round(rate * self._options.duration))
        times = arrival_times(count, rate, self._serve.burstiness, seed)
        samples = make_samples(dataset, count, self._vocabulary, seed)
        return self._stage(label, rate, samples, times)

    def _trace(self) -> Stage:
        options = self._options
        traced = trace_requests(
            TraceFile(options.trace),
            options.speed,
            options.duration,
            length_scale=options.length_scale,
        )
        samples = [
            Sample(
                prompt_token_ids=self._vocabulary[request.tokens % len(self._vocabulary)].tolist(),
                output_len=request.output_len,
            )
            for request in traced
        ]
        times = [request.arrival_s for request in traced]
        return self._stage("trace", len(times) / options.duration, samples, times)

    def _scenarios(self) -> Iterator[Stage]:
        options = self._options
        for name in SCENARIOS:
            rate = offered(name, options.rate)
            seed = self._next_seed()
            planned = make_traffic(name, rate, options.duration, self._vocabulary, seed=seed)
            requests = tuple(
                replace(
                    self._bodies.request(
                        plan.index,
                        Sample(prompt_token_ids=plan.prompt, output_len=plan.output_len),
                        # Omitted by default: on other servers priorities have other meanings.
                        {"priority": plan.priority} if plan.priority != DEFAULT_PRIORITY else None,
                    ),
                    arrival_s=plan.arrival_s,
                )
                for plan in planned
            )
            yield Stage(label=name, rate=len(requests) / options.duration, requests=requests)

    def _stage(
        self, label: str, rate: float, samples: Sequence[Sample], times: Sequence[float]
    ) -> Stage:
        requests = tuple(
            replace(self._bodies.request(index, sample), arrival_s=time)
            for index, (sample, time) in enumerate(zip(samples, times, strict=True))
        )
        return Stage(label=label, rate=rate, requests=requests)

    def _next_seed(self) -> int:
        self._num_stages += 1
        return self._serve.seed + 7919 * self._num_stages
