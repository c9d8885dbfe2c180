"""Flags of benchmark `router`, and dispatch to the variant they select."""

from __future__ import annotations

import argparse

from cluster.bench.command import reject_renamed
from cluster.bench.report import Result
from cluster.cli.options import add_options, given_options
from cluster.config import find_demo_model

_SIMULATED_TOO = ("workloads", "scale", "first_seed", "plot")


_GATEWAYS_TOO = ("workloads", "seeds", "first_seed", "scale", "traces")
_AGENTS_TOO = ("policies", "seeds", "first_seed", "workers")
_REAL_TOO = (
    *("gaps", "sessions", "num_workers", "host_share", "rounds", "first_seed", "model"),
    "variant",
)


def add_router_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the variants simulation, gateways, agents, replay, micro, real and
    validate."""
    from deploy.benchmarks.routing.agents.run import AgentOptions
    from deploy.benchmarks.routing.compare import SimOptions
    from deploy.benchmarks.routing.gateways import GatewayOptions
    from deploy.benchmarks.routing.micro import MicroOptions
    from deploy.benchmarks.routing.real.agent_options import RealAgentOptions
    from deploy.benchmarks.routing.real.options import RealOptions
    from deploy.benchmarks.routing.replay import ReplayOptions
    from deploy.benchmarks.routing.validate import ValidateOptions

    add_options(parser.add_argument_group("simulation"), SimOptions)
    add_options(parser.add_argument_group("gateways"), GatewayOptions, exclude=_GATEWAYS_TOO)
    add_options(parser.add_argument_group("replay"), ReplayOptions, exclude=("policies",))
    parser.add_argument(
        "--agents",
        action="store_true",
        help="simulate coding agents in closed loops, with and without the session gate",
    )
    add_options(parser.add_argument_group("agents"), AgentOptions, exclude=_AGENTS_TOO)
    parser.add_argument(
        "--micro",
        action="store_true",
        help="measure the time of a routing decision instead of simulating",
    )
    add_options(parser.add_argument_group("micro"), MicroOptions)
    parser.add_argument(
        "--real",
        action="store_true",
        help="real processes instead of a simulation: this gateway and others' routers in turn, "
        "in front of the same paced workers; with --agents, coding agents on this fleet, with and "
        "without session gate and host tier",
    )
    add_options(parser.add_argument_group("real"), RealOptions, exclude=_SIMULATED_TOO)
    add_options(parser.add_argument_group("real agents"), RealAgentOptions, exclude=_REAL_TOO)
    parser.add_argument(
        "--validate", action="store_true", help="compare the simulated worker with a real engine"
    )
    reject_renamed(parser, "--contender", "--policy")
    reject_renamed(parser, "--arm", "--variant")
    add_options(parser.add_argument_group("validate"), ValidateOptions, exclude=("model",))


def run_router(args: argparse.Namespace) -> Result:
    """Runs the benchmark that the flags select."""
    from deploy.benchmarks.routing.agents.run import AgentOptions, run_agents
    from deploy.benchmarks.routing.compare import SimOptions, run_router_sim
    from deploy.benchmarks.routing.gateways import GatewayOptions, run_gateways
    from deploy.benchmarks.routing.micro import MicroOptions, run_router_micro
    from deploy.benchmarks.routing.replay import ReplayOptions, run_replay
    from deploy.benchmarks.routing.validate import ValidateOptions, run_validate

    if args.validate:
        args.model = getattr(args, "model", "") or find_demo_model()
        return run_validate(ValidateOptions(**given_options(args, ValidateOptions)))
    if getattr(args, "gateways", 1) > 1:
        return run_gateways(GatewayOptions(**given_options(args, GatewayOptions)))
    if args.agents and args.real:
        # Imported here: it imports Serve applications, which the other variants do not need.
        from deploy.benchmarks.routing.real.agent_options import RealAgentOptions
        from deploy.benchmarks.routing.real.agents import run_agents_real

        return run_agents_real(RealAgentOptions(**given_options(args, RealAgentOptions)))
    if args.agents:
        return run_agents(AgentOptions(**given_options(args, AgentOptions)))
    if args.micro:
        return run_router_micro(MicroOptions(**given_options(args, MicroOptions)))
    if args.real:
        # Imported here: it imports Serve applications, which the other variants do not need.
        from deploy.benchmarks.routing.real.options import RealOptions
        from deploy.benchmarks.routing.real.run import run_router_real

        return run_router_real(RealOptions(**given_options(args, RealOptions)))
    if getattr(args, "replay", ""):
        return run_replay(ReplayOptions(**given_options(args, ReplayOptions)))
    return run_router_sim(SimOptions(**given_options(args, SimOptions)))
