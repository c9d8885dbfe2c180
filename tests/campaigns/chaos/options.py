"""What `make check-chaos` serves, and what it does to it."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.campaigns.chaos.kinds import KINDS
from tests.campaigns.chaos.planned_requests import LEAST_OUTPUT_LEN


@dataclass(frozen=True, kw_only=True, slots=True)
class ChaosOptions:
    """A fleet on this machine, its load, and the faults."""

    model: str | None = None
    """Checkpoint folder; the demo model unless given."""
    draft_model: str = ""
    """A smaller checkpoint with the model's tokenizer that drafts for it."""
    diffusion_model: str = ""
    """A block-diffusion checkpoint that is served, and asked, besides."""
    num_workers: int = 2
    """Worker groups of each model. With one, requests wait until it is back."""
    tensor_parallel_size: int = 2
    """Ranks of each."""
    num_gateways: int = 2
    """Gateway processes."""
    num_streams: int = 12
    """Clients at the same time; each sends its next request when it has the answer to the last."""
    output_len: int = 300
    """Most tokens of an answer."""
    duration_s: float = field(default=1200.0, metadata={"flag": "--duration"})
    """Seconds of faults."""
    period_s: float = field(default=20.0, metadata={"flag": "--period"})
    """Seconds from one fault to the next; more where the fleet takes longer to be whole again."""
    faults: tuple[str, ...] = ()
    """Kind of fault to run, may be given several times; all of them unless given."""
    stop_s: float = 10.0
    """Seconds for which a process is stopped whose place nobody takes."""
    longest_stop_s: float = 60.0
    """Seconds after which a stopped process goes on that should have been given up."""
    recovery_s: float = 240.0
    """Seconds in which the fleet has to be whole again after a fault; the run ends if it is not."""
    pressure_gib: float = 1.0
    """Memory that a process takes which is none of the fleet's; 2 GiB are left in any case."""
    step_timeout_s: float = 10.0
    """As in `rayfleet serve`."""
    seed: int = 0
    """Of the faults' order and of who is hit."""
    cancels: int = 0
    """Instead of faults: so many requests whose clients leave, at whatever moment."""
    soak_s: float = field(default=0.0, metadata={"flag": "--soak"})
    """Instead of faults: seconds of load at --soak-load of what the fleet carries."""
    soak_load: float = 0.8
    """Of the capacity that is measured first."""
    hostile_share: float = 0.01
    """Of the soak's requests: bodies that a server has to refuse."""

    def __post_init__(self) -> None:
        for name in ("num_workers", "num_gateways", "num_streams"):
            if getattr(self, name) < 1:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag} must be at least 1, got {getattr(self, name)}")
        if unknown := [name for name in self.faults if name not in KINDS]:
            raise ValueError(f"--faults {unknown[0]} is none of {', '.join(KINDS)}")
        if self.output_len < LEAST_OUTPUT_LEN:
            raise ValueError(
                f"--output-len must be at least {LEAST_OUTPUT_LEN}, got {self.output_len}: some of "
                "the requests ask for shorter answers with a least length"
            )
        for name in ("stop_s", "longest_stop_s", "recovery_s", "period_s", "duration_s"):
            if getattr(self, name) <= 0.0:
                flag = "--" + name.removesuffix("_s").replace("_", "-")
                raise ValueError(f"{flag} must be above 0, got {getattr(self, name)}")
        if self.cancels < 0 or self.soak_s < 0.0 or (self.cancels and self.soak_s):
            raise ValueError("give one of --cancels and --soak, above 0")
        if not 0.0 < self.soak_load < 1.0:
            raise ValueError(f"--soak-load must be between 0 and 1, got {self.soak_load}")
        if not 0.0 <= self.hostile_share <= 0.5:
            raise ValueError(f"--hostile-share must be in [0, 0.5], got {self.hostile_share}")
