"""An engine that works off requests with a fixed number of them running."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from cluster.bench.engine import GATEWAY, BenchEngine
from cluster.bench.speculative_prompts import Task
from worker.wire.messages import LoadSnapshot
from worker.wire.speculation import SpeculationTotals


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """What one engine did in one turn."""

    num_tokens: int
    elapsed_s: float
    num_steps: int
    busy_s: float
    """Rank 0's own time."""
    num_rows: int
    """Decoding requests, summed up over the steps."""
    num_draft_tokens: int
    num_accepted_tokens: int

    @property
    def tokens_per_second(self) -> float:
        """The figure that counts."""
        return self.num_tokens / self.elapsed_s

    @property
    def tokens_per_row(self) -> float:
        """Tokens that one request gets from one step."""
        return self.num_tokens / self.num_rows

    @property
    def token_s(self) -> float:
        """Time per token."""
        return self.elapsed_s / self.num_tokens

    @property
    def busy_token_s(self) -> float:
        """Rank 0's own time per token: a step's over its tokens."""
        return self.busy_s / self.num_tokens


class SpeculativeEngine(BenchEngine):
    """One engine as `LLM` has it, driven step by step.

    Args:
        config: of the engine.
    """

    def turn(self, tasks: Sequence[Task], running: int, count: int, number: int) -> Turn:
        """Works off `count` of the tasks, others in each turn, with `running` of them at once."""
        first = number * count
        waiting = iter([tasks[(first + place) % len(tasks)] for place in range(count)])
        before = self._load()
        num_tokens = num_rows = num_running = 0
        start = time.monotonic()
        for task in itertools.islice(waiting, running):
            self._submit(task)
            num_running += 1
        while num_running:
            report = self._step()
            for delta in report.deltas.get(GATEWAY, ()):
                num_tokens += len(delta.token_ids)
                num_rows += bool(delta.token_ids)
                if delta.finish_reason is None:
                    continue
                num_running -= 1
                for task in itertools.islice(waiting, 1):
                    self._submit(task)
                    num_running += 1
        elapsed = time.monotonic() - start
        while self._core.has_work():
            self._step()
        return _turn(before, self._load(), num_tokens, num_rows, elapsed)

    def _load(self) -> LoadSnapshot:
        """What the engine has done so far: a copy, since sums go on."""
        report = self._core.scheduler.take_report()
        report.load.step_times = self._core.timeline.totals()
        return msgspec.msgpack.decode(self._encoder.encode(report.load), type=LoadSnapshot)

    def _submit(self, task: Task) -> None:
        self._core.add(self._request(task.prompt, task.sampling))


def _turn(
    before: LoadSnapshot, after: LoadSnapshot, num_tokens: int, num_rows: int, elapsed: float
) -> Turn:
    a, b = before.step_times, after.step_times
    c, d = (load.speculation or SpeculationTotals() for load in (before, after))
    return Turn(
        num_tokens=num_tokens,
        elapsed_s=elapsed,
        num_steps=b.num_steps - a.num_steps,
        busy_s=sum(
            getattr(b, name) - getattr(a, name) for name in ("prepare", "forward", "sample")
        ),
        num_rows=num_rows,
        num_draft_tokens=d.num_draft_tokens - c.num_draft_tokens,
        num_accepted_tokens=d.num_accepted_tokens - c.num_accepted_tokens,
    )
