"""Options of `make check-chaos`."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.campaigns.chaos.kinds import KINDS
from tests.campaigns.chaos.planned_requests import LEAST_OUTPUT_LEN


@dataclass(frozen=True, kw_only=True, slots=True)
class ChaosOptions:
    """The fleet, its load, and the faults."""

    model: str | None = None
    """Checkpoint folder; default: the demo model."""
    draft_model: str = ""
    """Draft model: a smaller checkpoint with the model's tokenizer."""
    diffusion_model: str = ""
    """Block-diffusion checkpoint to serve and test in addition."""
    num_workers: int = 2
    """Worker groups per model. With one, requests wait until it has been restarted."""
    tensor_parallel_size: int = 2
    """Ranks per worker group."""
    num_gateways: int = 2
    """Number of gateway processes."""
    num_streams: int = 12
    """Number of concurrent clients; each sends its next request after the previous answer."""
    output_len: int = 300
    """Maximum number of tokens per answer."""
    duration_s: float = field(default=1200.0, metadata={"flag": "--duration"})
    """Seconds during which faults are injected."""
    period_s: float = field(default=20.0, metadata={"flag": "--period"})
    """Seconds between faults; longer if the fleet takes longer to recover."""
    faults: tuple[str, ...] = ()
    """Kind of fault to inject. Can be repeated. Default: all."""
    stop_s: float = 10.0
    """Seconds for which a process is stopped if it is not replaced."""
    longest_stop_s: float = 60.0
    """Seconds after which a stopped process that should have been replaced is resumed."""
    recovery_s: float = 240.0
    """Maximum recovery time in seconds; the run ends if recovery takes longer."""
    pressure_gib: float = 1.0
    """GiB of memory that an unrelated process allocates; at least 2 GiB are left free."""
    step_timeout_s: float = 10.0
    """Same as in `rayfleet serve`."""
    seed: int = 0
    """Seed of the order of faults and of the processes they hit."""
    adapters: int = 0
    """Number of LoRA adapters that are loaded, replaced and unloaded meanwhile, and used by the
    requests. Only gateways and workers are killed by default."""
    cancels: int = 0
    """Number of requests whose clients disconnect at random moments. Replaces faults; 0 disables
    it."""
    soak_s: float = field(default=0.0, metadata={"flag": "--soak"})
    """Seconds of steady load at --soak-load. Replaces faults; 0 disables it."""
    soak_load: float = 0.8
    """Load of the soak test as a fraction of the capacity, which is measured first."""
    hostile_share: float = 0.01
    """Fraction of the soak test's requests that have invalid bodies."""

    def __post_init__(self) -> None:
        for name in ("num_workers", "num_gateways", "num_streams"):
            if getattr(self, name) < 1:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag} must be at least 1, got {getattr(self, name)}")
        if unknown := [name for name in self.faults if name not in KINDS]:
            raise ValueError(f"--faults {unknown[0]} is not one of {', '.join(KINDS)}")
        if self.output_len < LEAST_OUTPUT_LEN:
            raise ValueError(
                f"--output-len must be at least {LEAST_OUTPUT_LEN}, got {self.output_len}: some of "
                "the requests have shorter answers with a minimum length"
            )
        for name in ("stop_s", "longest_stop_s", "recovery_s", "period_s", "duration_s"):
            if getattr(self, name) <= 0.0:
                flag = "--" + name.removesuffix("_s").replace("_", "-")
                raise ValueError(f"{flag} must be greater than 0, got {getattr(self, name)}")
        modes = (self.adapters, self.cancels, self.soak_s)
        if min(modes) < 0 or sum(map(bool, modes)) > 1:
            raise ValueError("set only one of --adapters, --cancels and --soak, above 0")
        if self.adapters == 1:
            raise ValueError("--adapters must be at least 2, so that one is loaded at any time")
        if self.adapters and self.diffusion_model:
            raise ValueError("--adapters are of --model: remove --diffusion-model")
        if not 0.0 < self.soak_load < 1.0:
            raise ValueError(f"--soak-load must be between 0 and 1, got {self.soak_load}")
        if not 0.0 <= self.hostile_share <= 0.5:
            raise ValueError(f"--hostile-share must be in [0, 0.5], got {self.hostile_share}")
