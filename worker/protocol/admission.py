"""Admission options: options for admitting waiting requests, which can be changed at run time."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Literal

import msgspec

from worker.protocol.analyzed import analyzed
from worker.protocol.options import option_name

SchedulePolicy = Literal["fcfs", "lpm"]
AdmissionPolicyName = Literal["fifo", "pack"]

MAX_COUNT = 2**31 - 1
"""Maximum value of all counts. No worker has more tokens, requests or steps, and numbers of more
than 64 bits cannot be sent."""
MIN_SHARE = 1e-3
"""Minimum value of `max_prefill_share`: about one token in a typical 1,000-token step."""

IN_SCHEDULER_CONFIG = {"within": "--scheduler-config"}
"""Metadata of options that have no separate flag and are set in the JSON object of another flag
(see cluster.cli)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmissionOptions:
    """Options of admission, which runs in every step that has room for prefill.

    They are part of `SchedulingConfig` (`worker.config`), and each of them can be changed at run
    time (`AdmissionChange`).

    Raises:
        ValueError: a value is out of range; the message names the flag or the field.
    """

    schedule_policy: SchedulePolicy = "fcfs"
    """Order of waiting requests of equal urgency: fcfs (first come, first served), or lpm (longest
    cached prefix first; falls back to fcfs when more than 128 requests are waiting)."""
    prefill_admission_policy: AdmissionPolicyName = "fifo"
    """Which waiting requests a step admits: fifo admits from the head of the queue while requests
    fit, pack admits those with the fewest uncached prompt tokens first."""
    prefill_admission_lookahead: int = field(default=64, metadata=IN_SCHEDULER_CONFIG)
    """Number of waiting requests that pack and lpm choose from."""
    prefill_force_fifo_every: int = field(default=0, metadata=IN_SCHEDULER_CONFIG)
    """Use fifo in every Nth admission round under pack; 0 disables this. Starvation is prevented in
    either case."""
    prefill_max_tokens: int = field(default=0, metadata=IN_SCHEDULER_CONFIG)
    """Maximum number of prompt tokens per step; 0 for no limit other than --max-num-batched-tokens.
    """
    default_tpot_ms: int = field(default=80, metadata=IN_SCHEDULER_CONFIG)
    """Target time per output token, in milliseconds, of requests without `slo.tpot_ms`; 0 for none.
    Prefill is limited so that a step's predicted time does not exceed the smallest target of its
    decodes, but to no less than 1/16 of --max-num-batched-tokens. The default is 80 % of the limit
    of MLPerf Inference's server scenario for an 8B model, since steps take longer than predicted if
    ranks and gateways share CPUs."""
    prefill_max_batch_size: int = field(default=0, metadata=IN_SCHEDULER_CONFIG)
    """Maximum number of requests admitted per step; 0 for no limit."""
    max_prefill_share: float = field(default=0.5, metadata=IN_SCHEDULER_CONFIG)
    """Maximum fraction of a step's prompt tokens that one prompt may use while others wait; 1 for
    no limit."""
    prefill_first_steps: int = field(default=0, metadata=IN_SCHEDULER_CONFIG)
    """Maximum consecutive prefill-only steps while prefills of at least equal urgency fill the
    token budget. Lowers TTFT, raises inter-token latency; 0 always includes decodes."""
    urgent_first_steps: int = field(default=4, metadata=IN_SCHEDULER_CONFIG)
    """Maximum consecutive prefill-only steps for a prompt whose priority exceeds that of the
    decodes by at least `preempt_priority_gap`, if the decodes would take at least 1/8 of the step's
    tokens or predicted time. 0 always includes decodes."""

    def __post_init__(self) -> None:
        for option in fields(AdmissionOptions):
            name, value = option.name, getattr(self, option.name)
            if not isinstance(option.default, int):
                continue
            minimum = 1 if name == "prefill_admission_lookahead" else 0
            if not minimum <= value <= MAX_COUNT:
                problem = f"must be in [{minimum}, {MAX_COUNT}], got {value}"
                raise ValueError(f"{option_name(self, name)} {problem}")
        if not MIN_SHARE <= self.max_prefill_share <= 1.0:
            problem = f"must be in [{MIN_SHARE}, 1], got {self.max_prefill_share}"
            raise ValueError(f"{option_name(self, 'max_prefill_share')} {problem}")


class AdmissionChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Change to some admission options; the others keep their values.

    Raises:
        ValueError: an option is unknown, or a value has the wrong type or is out of range.
    """

    given: dict[str, int | float | str] = {}
    """New values by option name."""

    def __post_init__(self) -> None:
        names = [option.name for option in fields(AdmissionOptions)]
        if unknown := [name for name in self.given if name not in names]:
            raise ValueError(f"unknown option {unknown[0]!r}: choose from {', '.join(names)}")
        self.applied_to(AdmissionOptions())

    def applied_to(self, options: AdmissionOptions) -> AdmissionOptions:
        """`options` with this change applied."""
        return msgspec.convert({**asdict(options), **self.given}, analyzed(AdmissionOptions))

    def then(self, later: AdmissionChange) -> AdmissionChange:
        """This change merged with a later one, whose values take precedence."""
        return AdmissionChange({**self.given, **later.given})
