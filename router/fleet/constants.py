"""Constants of routing decisions, with units and derivations.

Constants that bound memory or time without affecting decisions are defined where they are used. The
four weights of prefix-score are in RoutingConfig, as in the published scheduler that the formula
comes from.
"""

from __future__ import annotations

WINDOW_S = 10.0
"""Time constant in seconds of all moving averages: utilization, speed, work per request and uses of
prefixes. It covers 100 steps of 0.1 s: a mean over n steps has a relative error of about 1/√n, here
a tenth, similar to the error of work estimates."""
UNKNOWN_S = 1.0
"""Seconds of history assumed before the first observation: a new worker is assumed to have been
busy for half of this time; for a new prefix, all requests in this time are assumed to have had
other prefixes. Ten steps of 0.1 s, or ten requests, outweigh this history."""
BUSIEST = 0.98
"""Upper limit on utilization in cost terms: 1 - 0.2 s / WINDOW_S. The running step is not reported
yet, and a full chunk takes 0.2 s."""
BURST_S = 0.005
"""Seconds within which uses of a prefix are one burst and count once. A gateway may work on one
reply for this long before it reads others, so requests that arrive together may be read this far
apart."""
HOST_COPY = 0.1
"""Time to load a token's keys and values from host memory, relative to computing it. For a model
with 8 billion weights, 128 KiB at 25 GB/s (PCIe 4, 16 lanes) take 5 µs, and 16 GFLOP at 0.3 PFLOP/s
take 53 µs."""
OUTPUT_STEPS = 256
"""Predicted steps for which a request occupies a batch slot, one per output token. Chat answers
have 200 to 300 tokens (ShareGPT, LMSYS-Chat-1M)."""
TOLERANCE = 1e-3
"""Relative difference up to which costs count as equal. It is smaller than the error of estimates,
and far larger than rounding errors."""
PACE_GAIN = 0.05
"""Weight of a new step in the moving average of a worker's speed, which spans about 40 steps."""
SAME_PACE = 0.12
"""Difference in log speed up to which workers count as equally fast. Step times of identical
workers scatter by 0.15 (because of other load on the machine), and means over 40 steps by 0.024.
The means of 20 such workers span at most 5 times that."""
PACE_BOUND = 1.0
"""Maximum deviation of a step's time from the model, as a logarithm (a factor of e): slower steps
were delayed by something else and do not reflect the worker's speed."""
PACE_SPACING_S = 0.002
"""Minimum interval between observed steps of a worker, in seconds per worker of the fleet: with 100
workers, each worker is observed at most every 0.2 s. An observation costs a gateway about 10 µs, so
observations take at most 0.5 % of a core."""
PACE_DECODES = 4
"""One of this many decode steps of a worker is observed. Decode steps are frequent and similar, and
an observation costs a gateway about 10 µs: observing every fourth of 30 steps/s of 100 workers
takes 1 % of a core."""

ADAPTER_READ_S = 0.3
"""Assumed seconds to read a LoRA adapter until a worker has measured it: the time to read 100 to
300 MB from a disk."""
ADAPTER_HOST_COPY = 0.1
"""Time to load a LoRA adapter from host memory, as a fraction of the time to read it from disk:
PCIe transfers ten times the bytes per second of an NVMe disk."""
ADAPTER_REPORT_S = 2.0
"""Seconds for which a LoRA adapter is assumed to be loading on the worker that a request was sent
to: by then, the worker has read and reported it."""
