"""Workers that fail while they have requests, and other workers that resume them."""

from __future__ import annotations

from tests.support.router.rig import Rig
from tests.support.router.stub_worker import StubWorker


def finish(worker: StubWorker) -> None:
    while worker.running:
        worker.step()


async def lost_after(rig: Rig, num_steps: int) -> StubWorker:
    """Runs some steps on workers with requests, then crashes them; returns the workers that resume
    the requests."""
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
