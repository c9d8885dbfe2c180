"""Fleets to compare: models of one endpoint, each with its own workers."""

from __future__ import annotations

from dataclasses import replace

from cluster.bench.jobs.scenario_options import ScenarioRun
from cluster.config import EndpointConfig, FleetConfig, ModelSpec, ServeConfig
from cluster.ports import free_ports
from router.config import RoutingConfig

OURS = "rayfleet"
FIFO = "fifo"
DRAFTS = "drafts"


def serve_config(run: ScenarioRun) -> ServeConfig:
    """Configuration of an endpoint on a free port that serves all fleets of the options.

    The fleets share a proxy and a gateway, whose cost is thus the same for all, and get load in
    turn. The FIFO fleet prefills prompts in order of arrival with the token budget that decodes
    leave, never preempts a request for a more urgent one, and uses round-robin routing.
    """
    engine, options = run.engine, run.options
    plain = replace(engine, speculative=None)
    specs = [_spec(OURS, run, ModelSpec(fleet=FleetConfig(), engine=plain))]
    if options.compare_fifo:
        fifo = plain.with_options(
            schedule_policy="fcfs",
            prefill_admission_policy="fifo",
            prefill_force_fifo_every=0,
            prefill_first_steps=0,
            max_prefill_share=1.0,
            preempt_priority_gap=0,
        )
        routing = RoutingConfig(routing_policy="round-robin")
        specs.append(_spec(FIFO, run, ModelSpec(fleet=FleetConfig(), engine=fifo, routing=routing)))
    if options.speculative_compare:
        specs.append(_spec(DRAFTS, run, ModelSpec(fleet=FleetConfig(), engine=engine)))
    endpoint = EndpointConfig(host="127.0.0.1", port=free_ports(1)[0], log_level="warning")
    return ServeConfig(endpoint=endpoint, models=tuple(specs))


def _spec(name: str, run: ScenarioRun, spec: ModelSpec) -> ModelSpec:
    fleet = FleetConfig(num_workers=run.options.workers, served_model_name=name)
    return replace(spec, fleet=fleet)
