"""Checks of LoRA adapters before a worker uses them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from worker.core.adapter_folder import check_adapter
from worker.protocol.adapters import AdapterCheck, AdapterRef
from worker.protocol.messages import EngineInfo, Rejection, Submit

MAX_KNOWN = 4096
"""Maximum number of adapters remembered as checked; beyond it, the oldest ones are checked
again."""


class AdapterChecks:
    """Checks that folders contain the registered versions of adapters; other submits are rejected.

    The first request for an adapter waits for the check, which reads the files in a thread. If the
    content of the folder has changed, it is thus never used as the registered version, and never
    shares that version's prefix cache.
    """

    def __init__(self) -> None:
        self._checked: dict[AdapterRef, None] = {}

    async def check(self, folder: str, info: EngineInfo | None) -> AdapterCheck:
        """Checks the adapter in a folder for an engine. The result is empty if `info` is None, that
        is, while the engine is loading."""
        if info is None:
            return AdapterCheck()
        if not info.max_loras:
            return AdapterCheck(problem="adapters are disabled: use --enable-lora")
        return await asyncio.to_thread(check_adapter, folder, info.max_lora_rank)

    async def rejections(
        self, submits: Sequence[Submit], info: EngineInfo | None
    ) -> list[Rejection]:
        """Rejections of the submits whose adapter this worker cannot use. Submits with adapters
        that were already checked are not delayed."""
        problems: dict[AdapterRef, str] = {}
        for ref in dict.fromkeys(s.adapter for s in submits if s.adapter is not None):
            if ref not in self._checked and (problem := await self._problem(ref, info)):
                problems[ref] = problem
        return [
            Rejection(
                request_id=submit.request_id,
                attempt=submit.attempt,
                message=problems[submit.adapter],
                status=503,  # another worker may have the adapter
            )
            for submit in submits
            if submit.adapter is not None and submit.adapter in problems
        ]

    async def _problem(self, ref: AdapterRef, info: EngineInfo | None) -> str:
        """Reason why an adapter cannot be used; empty if it can."""
        if info is None:
            return "this worker is loading"
        if ref not in info.adapters:
            check = await self.check(ref.folder, info)
            if check.problem:
                return f"LoRA adapter {ref.name}: {check.problem}"
            if check.version != ref.version:
                return f"LoRA adapter {ref.name}: {ref.folder} has changed: load the adapter again"
        self._checked[ref] = None
        if len(self._checked) > MAX_KNOWN:
            del self._checked[next(iter(self._checked))]
        return ""
