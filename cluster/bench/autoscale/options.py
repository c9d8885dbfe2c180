"""What `python -m cluster.bench.autoscale` offers to which fleet."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cluster.autoscaling.config import AutoscalingConfig
from cluster.bench.arrivals import phased_arrival_times
from cluster.bench.routing.workload import DEFAULT_COSTS, FleetShape

MOST_WORKERS = 3
OUTPUT = 32
"""Tokens of a completion."""
PROMPT_LEN = 48
"""Tokens of a prompt, about."""
_SEGMENT_S = 5.0
_SWELL = 0.35
_JITTER = 0.3
_SWELL_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoscaleOptions:
    """A load step, then noise. Workers are paced: what they carry depends on no machine."""

    model: str | None = None
    """Folder with a tokenizer; the demo model unless given."""
    pace: float = 8.0
    """Times that steps take over those of a model of 70 billion weights on data-centre GPUs. The
    real scheduler plans them, and nothing is computed in them."""
    num_gateways: int = 2
    """Each tells of its part of the load."""
    low_s: float = 30.0
    """Seconds of a load for one worker, before the step up."""
    high_s: float = 60.0
    """Seconds of a load for three."""
    after_s: float = 200.0
    """Seconds of a load for one worker again."""
    noise_s: float = 600.0
    """Seconds of noisy load, around what is between one and two workers."""
    downscale_delay_s: float = 60.0
    """As in `rayfleet serve`."""
    seed: int = 0
    """Of arrivals and noise."""

    def __post_init__(self) -> None:
        for name in ("pace", "low_s", "high_s", "after_s", "noise_s", "downscale_delay_s"):
            if getattr(self, name) <= 0.0:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag} must be above 0, got {getattr(self, name)}")

    @property
    def shape(self) -> FleetShape:
        """A worker."""
        return FleetShape(costs=DEFAULT_COSTS, num_pages=1500, max_num_seqs=32)

    @property
    def autoscaling(self) -> AutoscalingConfig:
        """Its number."""
        return AutoscalingConfig(
            max_workers=MOST_WORKERS, downscale_delay_s=self.downscale_delay_s, upscale_delay_s=2.0
        )

    @property
    def worker_rate(self) -> float:
        """Requests per second that keep one worker as busy as it should be."""
        costs, places = self.shape.costs, self.shape.max_num_seqs
        token_s = costs.decode(places, places * (PROMPT_LEN + OUTPUT / 2)) / places
        request_s = (costs.prefill(PROMPT_LEN) + OUTPUT * token_s) * self.pace
        return self.autoscaling.target_load / request_s

    def step_times(self) -> list[float]:
        """When requests of the load step arrive."""
        low, high = 0.4 * self.worker_rate, 2.5 * self.worker_rate
        phases = [(self.low_s, low), (self.high_s, high), (self.after_s, low)]
        return phased_arrival_times(phases, self.seed)

    def noise_times(self) -> list[float]:
        """When requests of the noisy load arrive: every five seconds another rate, which swells
        and ebbs within a minute as well; within the five seconds they come as they like."""
        random = np.random.default_rng(self.seed)
        count = max(1, round(self.noise_s / _SEGMENT_S))
        width = round(_SWELL_S / _SEGMENT_S)
        swell = np.convolve(random.normal(0.0, 1.0, count + width - 1), np.ones(width), "valid")
        swell *= _SWELL / np.sqrt(width)
        jitter = random.normal(0.0, _JITTER, count)
        rates = 1.4 * self.worker_rate * np.exp(swell + jitter)
        phases = [(self.noise_s / count, float(rate)) for rate in rates]
        return phased_arrival_times(phases, self.seed + 1)
