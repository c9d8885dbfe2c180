"""Chromium before a gateway of stub workers, and what no page may do."""

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
"""Where no build of Playwright's can be fetched."""
SERIOUS = ("serious", "critical")
"""Impacts of axe-core that count."""


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """Playwright's own build where it is installed, else the distribution's."""
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
    """A page, and what it did that it should not."""

    page: Page
    faults: list[str] = field(default_factory=list)
    """Errors on the console, and requests to other hosts."""

    async def settings(self, column: int, **values: str) -> None:
        """Types settings of a column."""
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
        """Waits until a message holds a text."""
        await self.page.locator(".message", has_text=text).last.wait_for()

    async def whole(self) -> None:
        """Waits until no answer is under way."""
        await self.page.wait_for_selector("#stop:disabled")

    async def answers(self) -> list[str]:
        """Texts of all answers."""
        found = self.page.locator(".message.assistant .body")
        return [str(text) for text in await found.all_inner_texts()]


@asynccontextmanager
async def opened(browser: Browser, url: str, **context: Any) -> AsyncIterator[Watched]:
    """The page at a URL; afterwards it must not have done what it should not."""
    async with await browser.new_context(**context) as fresh:
        page = await fresh.new_page()
        watched = Watched(page)

        def console(message: Any) -> None:
            # A refusal that the page shows is on the console as well, by the browser.
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
    """Has /metrics tell of the stub workers, too, as a node's does."""

    def told_by(worker: StubWorker) -> bytes:
        load = worker.load()
        view = WorkerView("stub", worker.worker_id, 1, worker.info, load, WorkerLatency())
        return render(worker_metrics(view), TEXT)

    async def gather(_: str) -> tuple[bytes, str]:
        return b"".join([rig.gateway.metrics(TEXT), *map(told_by, rig.workers)]), TEXT

    rig.gateway.gather = gather
