"""How waiting requests are admitted: options of a worker that can change while it runs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

import msgspec

SchedulePolicy = Literal["fcfs", "lpm"]
AdmissionPolicyName = Literal["fifo", "pack"]

MOST = 2**31 - 1
"""Of every count: more are no tokens, requests or steps of one worker, and above 64 bits a number
could not even be sent there."""
LEAST_SHARE = 1e-3
"""Of a step's prompt tokens: about one of them, where the step takes the usual thousand."""

IN_SCHEDULER_CONFIG = {"within": "--scheduler-config"}
"""Metadata of options that have no flag of their own but are in a JSON object; see cluster.cli."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmissionOptions:
    """The rules of one admission round, of which every step that has room for prompts makes one.

    They are options of the engine, too (`worker.config`), and each may change while it runs
    (`AdmissionChange`): whoever adds one adds it here.

    Raises:
        ValueError: a value is out of range; the message names the flag, or its field.
    """

    schedule_policy: SchedulePolicy = "fcfs"
    """Order of equally urgent requests: fcfs; or lpm, longest cached prefix first, which is fcfs
    where more than 128 wait."""
    prefill_admission_policy: AdmissionPolicyName = "fifo"
    """Which of the waiting requests a step takes. fifo: from the head of the queue, while they fit;
    pack: the cheapest first, counted in uncached prompt tokens."""
    prefill_admission_lookahead: int = field(default=64, metadata=IN_SCHEDULER_CONFIG)
    """Waiting requests that pack and lpm look at."""
    prefill_force_fifo_every: int = field(default=0, metadata=IN_SCHEDULER_CONFIG)
    """Under pack every so many admission rounds are fifo; 0 for none. In any case nobody is passed
    over for ever."""
    prefill_max_tokens: int = field(default=0, metadata=IN_SCHEDULER_CONFIG)
    """Most prompt tokens of one step; 0 for what --max-num-batched-tokens leaves."""
    prefill_max_ms: int = field(default=75, metadata=IN_SCHEDULER_CONFIG)
    """Most milliseconds by which prompts make a step longer in which others decode, as far as steps
    of late foretell: beside decodes of 25, tokens of these are 100 apart, which MLPerf Inference
    allows an 8B model that is served. Prompts get a sixteenth of --max-num-batched-tokens in any
    case. 0 for any time."""
    prefill_max_batch_size: int = field(default=0, metadata=IN_SCHEDULER_CONFIG)
    """Most requests admitted in one step; 0 for any number."""
    max_prefill_share: float = field(default=0.5, metadata=IN_SCHEDULER_CONFIG)
    """Part of a step's prompt tokens that one prompt may take while others want some, 1 for all."""
    prefill_first_steps: int = field(default=0, metadata=IN_SCHEDULER_CONFIG)
    """Most steps in a row that leave out decodes which are no more urgent than the prompts that
    wait, while these would fill such a step by themselves: first tokens come sooner, others later.
    0 keeps all decodes in every step."""
    urgent_first_steps: int = field(default=4, metadata=IN_SCHEDULER_CONFIG)
    """Most steps in a row that leave out decodes which a prompt outranks by `preempt_priority_gap`,
    where these would take an eighth of such a step or more, of its tokens or, as steps of late
    tell, of its time. 0 keeps all decodes in every step."""

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
    """New values for some of the options; what is not given stays as it is.

    Raises:
        ValueError: there is no such option, or a value has another type or is out of range: there
            is no such change, here or on its way.
    """

    given: dict[str, int | float | str] = {}
    """Values by name of the option."""

    def __post_init__(self) -> None:
        names = [option.name for option in fields(AdmissionOptions)]
        if unknown := [name for name in self.given if name not in names]:
            raise ValueError(f"there is no option {unknown[0]}; known: {', '.join(names)}")
        self.applied_to(AdmissionOptions())

    def applied_to(self, options: AdmissionOptions) -> AdmissionOptions:
        """The options with these changes."""
        return msgspec.convert({**asdict(options), **self.given}, AdmissionOptions)

    def then(self, later: AdmissionChange) -> AdmissionChange:
        """Both changes in one."""
        return AdmissionChange({**self.given, **later.given})


def option_name(options: Any, name: str) -> str:
    """What a user calls an option: its flag; or the flag of a JSON object, and the field of it.

    Args:
        options: a dataclass of options, or an instance.
        name: of a field.
    """
    (option,) = (option for option in fields(options) if option.name == name)
    flag = option.metadata.get("within")
    return f"{name} in {flag}" if flag else "--" + name.replace("_", "-")
