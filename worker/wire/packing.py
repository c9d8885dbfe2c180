"""Batches as they are encoded: sampling parameters that submits share are in them once.

A request may ask for thousands of completions, and each of its parameters may be as large as the
vocabulary: spelled out per completion, they would halt whoever writes or reads them for seconds.
"""

from __future__ import annotations

import copy
from collections import Counter

from worker.wire.messages import IN_BATCH, SubmitBatch
from worker.wire.sampling import SamplingParams


def packed(batch: SubmitBatch) -> SubmitBatch:
    """The batch to be encoded; decoding undoes it, and the submits share their parameters again.

    Parameters are the same where they are one object.
    """
    uses = Counter(id(submit.sampling) for submit in batch.submits)
    places: dict[int, int] = {}
    samplings: list[SamplingParams] = []
    submits = []
    for submit in batch.submits:
        sampling = submit.sampling
        if uses[id(sampling)] > 1:
            if id(sampling) not in places:
                places[id(sampling)] = len(samplings)
                samplings.append(sampling)
            submit = copy.copy(submit)
            submit.sampling, submit.sampling_index = IN_BATCH, places[id(sampling)]
        submits.append(submit)
    if not samplings:
        return batch
    shorter = copy.copy(batch)  # not a new one, which would be unpacked as it is made
    shorter.submits, shorter.samplings = submits, samplings
    return shorter
