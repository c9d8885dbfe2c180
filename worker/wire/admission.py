"""How waiting requests are admitted: options of a worker that can change while it runs."""

from __future__ import annotations

from typing import Literal

import msgspec

SchedulePolicy = Literal["fcfs", "lpm"]
AdmissionPolicyName = Literal["fifo", "pack"]

MOST = 2**31 - 1
"""Of every count: more are no tokens, requests or steps of one worker, and above 64 bits a number
could not even be sent there."""
LEAST_SHARE = 1e-3
"""Of a step's prompt tokens: about one of them, where the step takes the usual thousand."""


class AdmissionOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The rules of one admission round, of which every step that has room for prompts makes one.

    Raises:
        ValueError: a value is out of range; the message names the flag.
    """

    schedule_policy: SchedulePolicy = "fcfs"
    """Order of the queue among equals."""
    prefill_admission_policy: AdmissionPolicyName = "fifo"
    """What of it a step takes."""
    prefill_admission_lookahead: int = 64
    """Waiting requests that pack and lpm look at."""
    prefill_force_fifo_every: int = 0
    """Every so many rounds are fifo; 0 for none."""
    prefill_max_tokens: int = 0
    """Prompt tokens of one step; 0 for what the step's budget leaves."""
    prefill_max_batch_size: int = 0
    """Requests that one round admits; 0 for any number."""
    max_prefill_share: float = 0.5
    """Part of a step's prompt tokens that one request may take while others want some."""
    prefill_first_steps: int = 0
    """Steps in a row without decodes while prompts wait; 0 for none."""
    urgent_first_steps: int = 4
    """Steps in a row without decodes that a prompt outranks, where that helps; 0 for none."""

    def __post_init__(self) -> None:
        for name, least in (
            ("prefill_admission_lookahead", 1),
            ("prefill_force_fifo_every", 0),
            ("prefill_max_tokens", 0),
            ("prefill_max_batch_size", 0),
            ("prefill_first_steps", 0),
            ("urgent_first_steps", 0),
        ):
            value = getattr(self, name)
            if not least <= value <= MOST:
                raise ValueError(f"{flag(name)} must be in [{least}, {MOST}], got {value}")
        if not LEAST_SHARE <= self.max_prefill_share <= 1.0:
            raise ValueError(
                f"--max-prefill-share must be in [{LEAST_SHARE}, 1], got {self.max_prefill_share}"
            )


class AdmissionChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """New values for some of the options; what is not set stays as it is.

    Raises:
        ValueError: a value is out of range: there is no such change, here or on its way.
    """

    schedule_policy: SchedulePolicy | msgspec.UnsetType = msgspec.UNSET
    prefill_admission_policy: AdmissionPolicyName | msgspec.UnsetType = msgspec.UNSET
    prefill_admission_lookahead: int | msgspec.UnsetType = msgspec.UNSET
    prefill_force_fifo_every: int | msgspec.UnsetType = msgspec.UNSET
    prefill_max_tokens: int | msgspec.UnsetType = msgspec.UNSET
    prefill_max_batch_size: int | msgspec.UnsetType = msgspec.UNSET
    max_prefill_share: float | msgspec.UnsetType = msgspec.UNSET
    prefill_first_steps: int | msgspec.UnsetType = msgspec.UNSET
    urgent_first_steps: int | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        self.applied_to(AdmissionOptions())

    def applied_to(self, options: AdmissionOptions) -> AdmissionOptions:
        """The options with these changes."""
        return msgspec.structs.replace(options, **self.given())

    def then(self, later: AdmissionChange) -> AdmissionChange:
        """Both changes in one."""
        return msgspec.structs.replace(self, **later.given())

    def given(self) -> dict[str, int | float | str]:
        """The values that are set."""
        values = msgspec.structs.asdict(self)
        return {name: value for name, value in values.items() if value is not msgspec.UNSET}


def flag(name: str) -> str:
    """The command-line flag of a field."""
    return "--" + name.replace("_", "-")
