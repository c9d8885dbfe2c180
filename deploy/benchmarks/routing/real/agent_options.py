"""Options of `router --agents --real`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, get_args

import msgspec

from deploy.benchmarks.routing.agents.load import Pace
from deploy.benchmarks.routing.workload import DEFAULT_COSTS, FleetShape

_PAGE: Final = 16
_CACHE_TOKENS: Final = 270_000
"""KV cache size of a worker in tokens, as in the simulation; divided by `compression` when used."""
_MAX_WAIT_S: Final = 600.0
"""Maximum wait at the gate in seconds, as in the simulation; divided by `compression` when used."""
DEFAULT, HOST, GATE, GATE_HOST = "default", "host", "gate", "gate-host"
FLEETS: Final = (DEFAULT, HOST, GATE, GATE_HOST)


@dataclass(frozen=True, kw_only=True, slots=True)
class RealAgentOptions:
    """Options of fleets, sessions and windows."""

    fleets: tuple[str, ...] = field(
        default=(DEFAULT, GATE, GATE_HOST), metadata={"flag": "--fleet"}
    )
    """Variant to measure with --agents --real: default (neither gate nor host tier), host, gate or
    gate-host. Can be repeated."""
    gaps: tuple[str, ...] = ("unattended",)
    """Gaps between turns, as in AgentOptions. Can be repeated."""
    sessions: tuple[int, ...] = (16,)
    """Numbers of concurrent sessions, each measured separately."""
    num_workers: int = 2
    """Number of paced workers per fleet."""
    compression: float = 3.6
    """Divisor for lengths, gaps, cache sizes and maximum waits of --agents --real. Workers process
    tokens at their real rate, so time is compressed as well. Above 3.7, first prompts can be too
    short for the gate."""
    window_s: float = 120.0
    """Seconds of load per variant with --agents --real; the first half is not measured."""
    host_share: float = 1.0
    """Size of the host tier relative to the device's KV cache."""
    rounds: int = 3
    """Number of runs per variant, each with new processes and sessions."""
    first_seed: int = 1
    """Seed of the first round."""
    model: str = ""
    """Folder with a tokenizer and a chat template for tools; default: the demo model."""
    variant: str = ""
    """Measure only this variant, once."""

    def __post_init__(self) -> None:
        if unknown := [one for one in (*self.fleets, self.variant) if one and one not in FLEETS]:
            raise ValueError(f"unknown variant {unknown[0]!r}: choose from {', '.join(FLEETS)}")
        if unknown := [one for one in self.gaps if one not in get_args(Pace)]:
            allowed = ", ".join(get_args(Pace))
            raise ValueError(f"--gaps: unknown pace {unknown[0]!r}: choose from {allowed}")
        if not self.sessions or min(self.sessions) < 1:
            raise ValueError(
                "--sessions must be one or more positive integers, such as `--sessions 8 16`, got "
                f"{' '.join(map(str, self.sessions)) or 'none'}"
            )
        if self.variant and (len(self.sessions) > 1 or len(self.gaps) > 1):
            raise ValueError("--variant requires a single --sessions and a single --gaps")
        for name in ("num_workers", "window_s", "host_share", "rounds"):
            if getattr(self, name) <= 0:
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag} must be greater than 0, got {getattr(self, name):g}")
        if self.compression < 1.0:
            raise ValueError(f"--compression must be at least 1, got {self.compression:g}")

    @property
    def max_wait_s(self) -> float:
        """Maximum wait at the gate of `variant` in seconds; 0 if it has no gate."""
        return _MAX_WAIT_S / self.compression if self.variant in (GATE, GATE_HOST) else 0.0

    @property
    def shape(self) -> FleetShape:
        """Limits and speeds of the paced workers of `variant`.

        Steps take as long and process as many tokens as at full length, so that the ratios between
        prompts, answers and gaps stay the same. The cost of attention is multiplied by
        `compression`, because contexts are shorter.
        """
        num_pages = int(_CACHE_TOKENS / self.compression) // _PAGE
        has_host = self.variant in (HOST, GATE_HOST)
        return FleetShape(
            slowness=(1.0,) * self.num_workers,
            costs=msgspec.structs.replace(
                DEFAULT_COSTS,
                attended=DEFAULT_COSTS.attended * self.compression,
                context_token=DEFAULT_COSTS.context_token * self.compression,
            ),
            page_size=_PAGE,
            num_pages=num_pages,
            num_host_pages=int(self.host_share * num_pages) if has_host else 0,
        )
