"""Admission options: the rules by which a worker admits waiting requests; they may change."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

import msgspec

SchedulePolicy = Literal["fcfs", "lpm"]
AdmissionPolicyName = Literal["fifo", "pack"]

MOST = 2**31 - 1
"""Largest value of any count: no worker has more tokens, requests or steps, and a number of more
than 64 bits could not be sent to one."""
LEAST_SHARE = 1e-3
"""Least share of a step's prompt tokens: about one token of a step of the usual thousand."""

IN_SCHEDULER_CONFIG = {"within": "--scheduler-config"}
"""Metadata of options that have no flag of their own but are in a JSON object; see cluster.cli."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmissionOptions:
    """Rules of an admission round, which every step makes that has room for prompts.

    They are options of the engine (`worker.config` inherits them), and each may change while it
    runs (`AdmissionChange`).

    Raises:
        ValueError: a value is out of range; the message names the flag, or its field.
    """

    schedule_policy: SchedulePolicy = "fcfs"
    """Order of equally urgent waiting requests: fcfs, first come, first served; or lpm, longest
    prefix match (most cached tokens) first, which is fcfs where more than 128 wait."""
    prefill_admission_policy: AdmissionPolicyName = "fifo"
    """Which waiting requests a step admits. fifo: from the head of the queue, while they fit; pack:
    those with fewest uncached prompt tokens first."""
    prefill_admission_lookahead: int = field(default=64, metadata=IN_SCHEDULER_CONFIG)
    """Waiting requests that pack and lpm choose from."""
    prefill_force_fifo_every: int = field(default=0, metadata=IN_SCHEDULER_CONFIG)
    """Under pack, one in so many admission rounds is fifo; 0 for none. In any case no request is
    passed over for ever."""
    prefill_max_tokens: int = field(default=0, metadata=IN_SCHEDULER_CONFIG)
    """Most prompt tokens of one step; 0 for all that --max-num-batched-tokens leaves."""
    prefill_max_ms: int = field(default=75, metadata=IN_SCHEDULER_CONFIG)
    """Most milliseconds by which prompts make a step longer in which other requests decode, as
    predicted from recent steps. With decodes that take 25 ms, tokens are then at most 100 ms apart,
    the limit of MLPerf Inference's server scenario for an 8B model. Prompts get a sixteenth of
    --max-num-batched-tokens in any case. 0 for no limit."""
    prefill_max_batch_size: int = field(default=0, metadata=IN_SCHEDULER_CONFIG)
    """Most requests admitted in one step; 0 for any number."""
    max_prefill_share: float = field(default=0.5, metadata=IN_SCHEDULER_CONFIG)
    """Share of a step's prompt tokens that one prompt may take while others wait; 1 for all."""
    prefill_first_steps: int = field(default=0, metadata=IN_SCHEDULER_CONFIG)
    """Most steps in a row without decodes that are no more urgent than the prompts, while these
    fill such a step by themselves: first tokens come sooner, others later. 0 keeps all decodes in
    every step."""
    urgent_first_steps: int = field(default=4, metadata=IN_SCHEDULER_CONFIG)
    """Most steps in a row without decodes that a prompt outranks by `preempt_priority_gap`, where
    these would take an eighth or more of the step's tokens or of its predicted time. 0 keeps all
    decodes in every step."""

    def __post_init__(self) -> None:
        for option in fields(AdmissionOptions):
            name, value = option.name, getattr(self, option.name)
            if not isinstance(option.default, int):
                continue
            least = 1 if name == "prefill_admission_lookahead" else 0
            if not least <= value <= MOST:
                problem = f"must be in [{least}, {MOST}], got {value}"
                raise ValueError(f"{option_name(self, name)} {problem}")
        if not LEAST_SHARE <= self.max_prefill_share <= 1.0:
            problem = f"must be in [{LEAST_SHARE}, 1], got {self.max_prefill_share}"
            raise ValueError(f"{option_name(self, 'max_prefill_share')} {problem}")


class AdmissionChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Change of some admission options; those not given stay as they are.

    Raises:
        ValueError: an option is unknown, or a value has the wrong type or is out of range.
    """

    given: dict[str, int | float | str] = {}
    """New values by name of the option."""

    def __post_init__(self) -> None:
        names = [option.name for option in fields(AdmissionOptions)]
        if unknown := [name for name in self.given if name not in names]:
            raise ValueError(f"there is no option {unknown[0]}; known: {', '.join(names)}")
        self.applied_to(AdmissionOptions())

    def applied_to(self, options: AdmissionOptions) -> AdmissionOptions:
        """The options with this change."""
        return msgspec.convert({**asdict(options), **self.given}, AdmissionOptions)

    def then(self, later: AdmissionChange) -> AdmissionChange:
        """This change and a later one, merged."""
        return AdmissionChange({**self.given, **later.given})


def option_name(options: Any, name: str) -> str:
    """Name of an option for users: its flag, or its key in the JSON object of another flag.

    Args:
        options: a dataclass of options, or an instance.
        name: name of a field.
    """
    (option,) = (option for option in fields(options) if option.name == name)
    flag = option.metadata.get("within")
    return f"{name} in {flag}" if flag else "--" + name.replace("_", "-")
