"""Constants of routing decisions: the unit of each, and where it comes from.

Constants that bound memory or time, and change no decision, are where they are used. The four
weights of prefix-score are in RoutingConfig, as in the published scheduler that the formula is
from.
"""

from __future__ import annotations

WINDOW_S = 10.0
"""Time constant, in seconds, of all moving averages: of utilisations, speeds, work per request and
uses of prefixes. That is 100 steps of 0.1 s: a mean over n steps has a relative error of about
1/√n, here a tenth, as estimates of work have."""
UNKNOWN_S = 1.0
"""Seconds of assumed observation before the first: of a new worker half of it busy, of a new prefix
a second of requests for others. Small against ten steps of 0.1 s, or ten requests."""
BUSIEST = 0.98
"""Greatest utilisation that is believed: 1 - 0.2 s / WINDOW_S. The step under way is not reported
yet, and a full chunk takes 0.2 s."""
BURST_S = 0.005
"""Seconds within which uses of a prefix are one burst, and count once. A gateway works so long on
one reply before it reads others: requests that arrive together are read so far apart."""
HOST_COPY = 0.1
"""Time to load a token's key-value pairs from host memory, over the time to compute it. For a model
of 8 billion weights: 128 KiB at 25 GB/s (PCIe 4, 16 lanes) are 5 µs, 16 GFLOP at 0.3 PFLOP/s 53
µs."""
OUTPUT_STEPS = 256
"""Expected steps for which a request occupies a slot of the batch, one per output token. Chat
answers have 200 to 300 tokens (ShareGPT, LMSYS-Chat-1M)."""
TOLERANCE = 1e-3
"""Relative difference up to which costs are equal: less than the error of estimates, and far more
than that of rounding."""
PACE_GAIN = 0.05
"""Weight of a new step in the moving average of a worker's speed, over some 40 steps."""
SAME_PACE = 0.12
"""Difference of logarithms up to which speeds of workers are equal. Step times of like workers
scatter by 0.15 (other load on the machine), means over 40 steps by 0.024: 20 workers lie within 5
times it."""
PACE_BOUND = 1.0
"""Largest deviation of a step's time from the model, as a logarithm (a factor of e): slower steps
were held up by something else, and say nothing of speed."""
PACE_DECODES = 4
"""Decode steps per one that is observed. They are many and alike, and an observation costs a
gateway some 10 µs: every fourth of 30 steps/s of 100 workers takes 1 % of a core."""
