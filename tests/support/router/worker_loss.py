"""Workers that fail while they have requests, and others that continue them."""

from __future__ import annotations

from tests.support.router.rig import Rig
from tests.support.router.stub_worker import StubWorker


def finish(worker: StubWorker) -> None:
    while worker.running:
        worker.step()


async def lost_after(rig: Rig, num_steps: int) -> StubWorker:
    """Workers with requests run some steps and crash; returns the workers that have them then."""
    await rig.until(lambda: any(w.running for w in rig.workers))
    [worker] = [w for w in rig.workers if w.running]
    for _ in range(num_steps):
        worker.step()
    num_submits = len(rig.submits())
    worker.vanish()
    await rig.until(lambda: len(rig.submits()) > num_submits)
    [after] = [w for w in rig.workers if w.running]
    assert after is not worker
    return after
