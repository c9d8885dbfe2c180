"""An engine that selects each request's LoRA adapter by its first token, with the full
scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tests.support.engines.engine_driver import Engine
from worker.plan.plan import AdapterLoad, AdapterRead, Plan
from worker.rank.runner import ModelRunner
from worker.rank.steps import ForwardStep


def load_adapters(runner: ModelRunner, folders: Sequence[Path]) -> None:
    """Loads adapters into slots 1 and up."""
    reads = [AdapterRead(key, str(folder)) for key, folder in enumerate(folders, 1)]
    loads = [AdapterLoad(read.key, read.key) for read in reads]
    result = runner.execute(Plan(0, [], [], [], adapter_reads=reads, adapter_loads=loads))
    assert [(read.key, read.error) for read in result.adapters_read] == [
        (read.key, "") for read in reads
    ]


def adapter_of(prompt: Sequence[int], num_adapters: int) -> int:
    """Slot of a request's adapter; 0 if it has none. Prompts with different adapters share no
    prefix."""
    return prompt[0] % (num_adapters + 1)


class _AdapterEngine(Engine):
    """An engine on one rank, with the adapters `folders`."""

    folders: Sequence[Path] = ()
    """Adapters in slots 1 and up."""
    num_slots = 0
    """Number of slots, including empty ones."""

    def __init__(self, folder: str, **options: Any) -> None:
        options |= {"enable_lora": True, "max_loras": self.num_slots, "max_lora_rank": 24}
        super().__init__(folder, **options)
        if self.folders:
            load_adapters(self.runner, self.folders)
        forward = self.runner.forward

        def with_adapters(plan: Plan) -> ForwardStep:
            admits = [
                msgspec.structs.replace(
                    admit,
                    adapter=adapter_of(
                        np.frombuffer(admit.token_ids, "<i4").tolist(), self.num_slots
                    ),
                )
                for admit in plan.admits
            ]
            return forward(msgspec.structs.replace(plan, admits=admits))

        self.runner.forward = with_adapters  # type: ignore[method-assign]


def engine_with(folders: Sequence[Path], kind: type[Engine] = Engine) -> type[Any]:
    """Subclass of an engine class, with these adapters."""
    own = {"folders": tuple(folders), "num_slots": len(folders)}
    return type("OwnEngine", (_AdapterEngine, kind), own)


class EmptySlotsEngine(_AdapterEngine):
    """An engine whose requests use empty adapter slots, which are zero."""

    num_slots = 2
