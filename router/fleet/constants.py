"""Every number of routing that could have been another one: its unit, and where it comes from.

What is about memory or speed, not about who is chosen, stands where it is used. The four weights of
prefix-score are in RoutingConfig, as the published scheduler has them whose formula it is.
"""

from __future__ import annotations

WINDOW_S = 10.0
"""Seconds after which an observation weighs 1/e: of how busy workers are, how fast they look, how
much work requests bring, how often a prefix returns. A hundred steps of a tenth of a second: a mean
over n steps is off by about 1/√n, here a tenth, which is what estimates of work are off by, too."""
UNKNOWN_S = 1.0
"""Seconds of observation that stand before the first one: of a worker half of them busy, since
nothing is known of it; of a prefix a second in which others were asked for. Ten steps of a tenth of
a second, or ten requests, count more than that."""
BUSIEST = 0.98
"""Greatest utilisation. The step under way is not reported yet: 0.2 s (a full chunk) of WINDOW_S
are not known."""
BURST_S = 0.005
"""Seconds within which requests are one burst, that is one observation. As long as a gateway works
on one reply before it serves others: what arrives together may be read so far apart."""
HOST_COPY = 0.1
"""Seconds to fetch a token's key-value pairs from host memory, per second to compute it. A model of
8 billion weights: 128 KiB at 25 GB/s (PCIe 4, 16 lanes) are 5 µs, 16 GFLOP at 0.3 PFLOP/s 53 µs."""
OUTPUT_STEPS = 256
"""Steps for which a request occupies a slot of the batch. Answers of chats have 200 to 300 tokens
(ShareGPT, LMSYS-Chat-1M), and a step makes one."""
TOLERANCE = 1e-3
"""Relative difference of costs that are equal. No estimate is as good; rounding is far better."""
PACE_GAIN = 0.05
"""Weight of a new step in a worker's speed: a mean over some 40 steps (2 / gain - 1)."""
SAME_PACE = 0.12
"""Difference of logarithms of speeds that are equal. Steps of like workers scatter by 0.15 (other
load on the machine), their means over 40 by 0.024: five times that holds 20 equal workers."""
PACE_BOUND = 1.0
"""Most that one step may differ from what was expected, as a logarithm (a factor of e): a step
that something held up says nothing of speed."""
PACE_DECODES = 4
"""Steps without prompts per one that is observed. They are many and alike, and an observation costs
a gateway some 10 µs: at 30 steps/s of 100 workers every fourth takes 1 % of a core."""
