"""Chromium in front of a gateway with stub workers, and checks that apply to every page."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from playwright.async_api import Browser, Page, async_playwright

from tests.support.router.rig import Rig
from tests.support.router.stub_worker import StubWorker
from worker.metrics.collector import WorkerView, worker_metrics
from worker.metrics.latency import WorkerLatency
from worker.protocol.exposition import TEXT, render

DISTRIBUTION = ("chromium", "chromium-browser", "google-chrome")
"""Executable names of the distribution's Chromium, which is used if Playwright's build is not
installed."""
SERIOUS = ("serious", "critical")
"""Impact levels of axe-core findings that fail a test."""


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """Playwright's Chromium if installed, otherwise the distribution's."""
    async with async_playwright() as playwright:
        own = Path(playwright.chromium.executable_path).exists()
        found = None if own else next(filter(None, map(shutil.which, DISTRIBUTION)), None)
        browser = await playwright.chromium.launch(
            executable_path=found, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        try:
            yield browser
        finally:
            await browser.close()


@dataclass
class Watched:
    """A page, with its console errors and requests to other hosts."""

    page: Page
    faults: list[str] = field(default_factory=list)
    """Console errors and requests to other hosts; must stay empty."""

    async def settings(self, column: int, **values: str) -> None:
        """Sets fields in a column's settings."""
        root = self.page.locator(".column").nth(column)
        if not await root.locator("[name=system]").is_visible():
            await root.locator("summary").click()
        for name, value in values.items():
            await root.locator(f"[name={name}]").fill(value)

    async def say(self, text: str) -> None:
        """Types a message and presses Enter."""
        await self.page.fill("#message", text)
        await self.page.press("#message", "Enter")

    async def shows(self, text: str) -> None:
        """Waits until a message contains the text."""
        await self.page.locator(".message", has_text=text).last.wait_for()

    async def whole(self) -> None:
        """Waits until no response is in progress."""
        await self.page.wait_for_selector("#stop:disabled")

    async def answers(self) -> list[str]:
        """Texts of all responses."""
        found = self.page.locator(".message.assistant .body")
        return [str(text) for text in await found.all_inner_texts()]


@asynccontextmanager
async def opened(browser: Browser, url: str, **context: Any) -> AsyncIterator[Watched]:
    """Opens a URL; on exit, fails if there were console errors or requests to other hosts."""
    async with await browser.new_context(**context) as fresh:
        page = await fresh.new_page()
        watched = Watched(page)

        def console(message: Any) -> None:
            # The browser logs a failed request to the console even if the page shows the error.
            if message.type == "error" and "Failed to load resource" not in message.text:
                watched.faults.append(message.text)

        page.on("console", console)
        page.on("pageerror", lambda error: watched.faults.append(str(error)))
        page.on(
            "request",
            lambda r: None if r.url.startswith(url) else watched.faults.append(r.url),
        )
        await page.goto(url)
        yield watched
    assert not watched.faults


def told_with_workers(rig: Rig) -> None:
    """Includes the stub workers in /metrics, as on a real node."""

    def told_by(worker: StubWorker) -> bytes:
        load = worker.load()
        view = WorkerView("stub", worker.worker_id, 1, worker.info, load, WorkerLatency())
        return render(worker_metrics(view), TEXT)

    async def gather(_: str) -> tuple[bytes, str]:
        return b"".join([rig.gateway.metrics(TEXT), *map(told_by, rig.workers)]), TEXT

    rig.gateway.gather = gather
