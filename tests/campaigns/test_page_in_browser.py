"""`make check-browser`: typical uses of the page in Chromium, with stub workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright")
pytest.importorskip("axe_playwright_python")
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser

from router.config import RoutingConfig
from tests.campaigns.browser.pages import SERIOUS, Watched, chromium, opened, told_with_workers
from tests.support.router.agent import agent_rig, build_agent
from tests.support.router.rig import Rig, build_checkpoint
from worker.protocol.adapters import AdapterTotals
from worker.protocol.text.tokenizer import Tokenizer, load_tokenizer

pytestmark = pytest.mark.long

STEP_S = 0.02
LONG = "hello world, the quick brown fox jumps over the lazy dog. " * 10
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": 30}}\n</tool_call>'
TOOLS = '[{"name": "add", "parameters": {"type": "object"}}]'
Model = tuple[Path, Tokenizer]


@pytest.fixture(scope="module")
def agent_model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("agent")
    build_agent(folder)
    return folder, load_tokenizer(str(folder))


@pytest.fixture(scope="module")
def plain_model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("plain")
    build_checkpoint(folder)
    return folder, load_tokenizer(str(folder))


@asynccontextmanager
async def serving(rig: Rig, **config: Any) -> AsyncIterator[tuple[str, Browser]]:
    """The gateway over HTTP with slow workers, and a browser."""
    await rig.start(running=False, **config)
    rig.tasks = [asyncio.create_task(worker.run(STEP_S)) for worker in rig.workers]
    told_with_workers(rig)
    async with rig.server() as url, chromium() as browser:
        yield url, browser
    await rig.stop()


async def test_a_chat_is_streamed_stopped_and_begun_anew(agent_model: Model) -> None:
    rig = agent_rig(*agent_model)
    async with serving(rig) as (url, browser), opened(browser, url) as watched:
        page = watched.page
        await page.wait_for_selector("[name=model] option", state="attached")
        await watched.say("hello there")
        await watched.whole()
        assert await watched.answers() == [rig.answer]
        figures = await page.inner_text(".figures")
        assert "prompt tokens" in figures
        assert "first token after" in figures
        rig.answer = LONG
        await watched.say("more")
        await watched.shows("jumps")
        await page.click("#stop")
        await watched.whole()
        stopped = (await watched.answers())[1]
        assert stopped
        assert LONG.startswith(stopped)
        assert "stopped" in await page.locator(".figures").nth(1).inner_text()
        await rig.until(lambda: not any(worker.running for worker in rig.workers))
        rig.answer = "three four"
        await watched.say("and now?")
        await watched.whole()
        prompt = rig.tokenizer.decode(memoryview(rig.submits()[-1].prompt).cast("i").tolist())
        assert "hello there" in prompt
        assert stopped in prompt
        await page.click("#new-chat")
        assert await page.locator(".message").count() == 0


async def test_settings_and_a_schema_reach_the_endpoint(agent_model: Model) -> None:
    rig = agent_rig(*agent_model)
    rig.answer = '{"a": 1}'
    async with serving(rig) as (url, browser), opened(browser, url) as watched:
        page = watched.page
        schema = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}})
        await watched.settings(0, temperature="0", max_tokens="7", seed="3", schema=schema)
        await watched.say("an object")
        await watched.whole()
        [submit] = rig.submits()
        assert (submit.sampling.temperature, submit.sampling.max_tokens, submit.seed) == (0, 7, 3)
        assert submit.sampling.structured_outputs is not None
        for name, value, problem in (
            ("schema", "{", "JSON schema is not valid JSON"),
            ("top_k", "1.5", "Top k must be a whole number"),
        ):
            await watched.settings(0, **{name: value})
            await watched.say("again")
            assert problem in await page.inner_text("#notice")
            await watched.settings(0, **{name: ""})
        await watched.settings(0, top_p="9")
        await watched.say("refused")
        await watched.whole()
        assert "top_p" in await page.inner_text(".error")
        assert len(rig.submits()) == 1


async def test_a_tool_call_is_answered_by_hand(agent_model: Model) -> None:
    rig = agent_rig(*agent_model)
    rig.answer = CALL
    async with serving(rig) as (url, browser), opened(browser, url) as watched:
        page = watched.page
        await watched.settings(0, tools=TOOLS)
        await watched.say("What is 12 + 30?")
        await page.wait_for_selector(".call form")
        assert "add({" in await page.inner_text(".call code")
        rig.answer = "It is 42"
        await page.fill(".call input", "42")
        await page.press(".call input", "Enter")
        await watched.shows("It is 42")
        prompt = rig.tokenizer.decode(memoryview(rig.submits()[-1].prompt).cast("i").tolist())
        assert "tool\n42" in prompt


async def test_two_settings_side_by_side(agent_model: Model) -> None:
    rig = agent_rig(*agent_model)
    async with serving(rig) as (url, browser), opened(browser, url) as watched:
        page = watched.page
        await watched.settings(0, seed="5")
        await page.check("#two")
        await watched.settings(1, temperature="0")
        await watched.say("both of you")
        await watched.whole()
        assert await watched.answers() == [rig.answer] * 2
        asked = {(submit.sampling.temperature, submit.seed) for submit in rig.submits()}
        assert asked == {(0.5, 5), (0.0, 5)}


async def test_a_model_writes_no_html(agent_model: Model) -> None:
    rig = agent_rig(*agent_model)
    rig.answer = "<img src=x onerror=alert(1)><b>bold</b>"
    async with serving(rig) as (url, browser), opened(browser, url) as watched:
        await watched.say("show me")
        await watched.whole()
        assert await watched.answers() == [rig.answer]
        assert await watched.page.locator(".message img, .message b").count() == 0


MARKDOWN = """\
# A title

One **bold** and *slanted* `co*de*` line,
and snake_case_name, 2 * 3 * 4.

- first
- second
  1. inner

> quoted

| a | b |
|---|---|
| 1 | **2** |

[docs](https://example.org/a) [no](javascript:alert(1)) ![i](https://example.org/i.png)

```html
<script>alert("**x**")</script>
```"""


async def test_an_answer_in_markdown_is_shown_as_such(agent_model: Model) -> None:
    rig = agent_rig(*agent_model)
    rig.answer = MARKDOWN
    async with serving(rig) as (url, browser), opened(browser, url) as watched:
        await watched.say("show me")
        await watched.whole()
        body = watched.page.locator(".message.assistant .body")
        for selector, text in {
            "h3": "A title",
            "strong >> nth=0": "bold",
            "em": "slanted",
            "p code": "co*de*",
            "ul > li >> nth=0": "first",
            "ul ol > li": "inner",
            "blockquote": "quoted",
            "td strong": "2",
            "pre code": '<script>alert("**x**")</script>',
        }.items():
            assert await body.locator(selector).inner_text() == text
        assert "snake_case_name, 2 * 3 * 4." in await body.inner_text()
        assert "[no](javascript:alert(1))" in await body.inner_text()
        links = [await link.get_attribute("href") for link in await body.locator("a").all()]
        assert links == ["https://example.org/a", "https://example.org/i.png"]
        assert await body.locator("script, img").count() == 0
        # JSON generated by a schema is shown verbatim.
        rig.answer = '{"a": "*1*"}'
        await watched.settings(0, schema='{"type": "object"}')
        await watched.say("an object")
        await watched.whole()
        assert (await watched.answers())[1] == rig.answer


@pytest.mark.parametrize(
    "text",
    ["*a " * 30000, "[" * 60000, "[a](" * 20000, "`a``b" * 15000, "-" * 60000 + "x", "*a* " * 20000,
     "> " * 30000, "~" * 60000 + "`", "|" * 60000 + "\n" + "-|" * 30000],
    ids=lambda text: text[:5],
)  # fmt: skip
async def test_no_text_takes_long_to_show(agent_model: Model, text: str) -> None:
    rig = agent_rig(*agent_model)
    async with serving(rig) as (url, browser), opened(browser, url) as watched:
        ms = await watched.page.evaluate(
            "async (text) => { const { showMarkdown } = await import('./ui/markdown.js');"
            " const root = document.createElement('div'); const begun = performance.now();"
            " showMarkdown(root, text); return performance.now() - begun; }",
            text,
        )
        assert ms < 5000, "quadratic: a linear pass takes 0.1 to 0.5 s"


async def test_an_example_is_a_click_away_while_a_chat_is_empty(agent_model: Model) -> None:
    rig = agent_rig(*agent_model)
    async with serving(rig) as (url, browser), opened(browser, url) as watched:
        page = watched.page
        await page.wait_for_selector("[name=model] option", state="attached")
        examples = page.locator("#examples button")
        assert await examples.count() == 3
        text = await examples.nth(1).inner_text()
        await examples.nth(1).click()
        await watched.whole()
        assert await page.locator(".message.user .body").all_inner_texts() == [text]
        assert await watched.answers() == [rig.answer]
        assert not await examples.nth(0).is_visible()
        await page.click("#new-chat")
        assert await examples.nth(0).is_visible()


@pytest.mark.parametrize("width", [1280, 360])
async def test_a_new_message_is_in_view(agent_model: Model, width: int) -> None:
    rig = agent_rig(*agent_model)
    rig.answer = "line\n" * 60
    size: Any = {"width": width, "height": 600}
    async with serving(rig) as (url, browser), opened(browser, url, viewport=size) as watched:
        page = watched.page
        await watched.say("first")
        await watched.whole()
        await page.locator(".messages").evaluate("log => (log.scrollTop = 0)")
        await watched.settings(0, temperature="0")
        rig.answer = "three four"
        await watched.say("second")
        await watched.whole()
        for locator in (page.locator(".message.user").last, page.locator(".figures").last):
            shown = await locator.evaluate(
                "one => { const { top, bottom } = one.getBoundingClientRect();"
                " const log = one.closest('.messages').getBoundingClientRect();"
                " return top >= log.top - 1 && bottom <= Math.min(log.bottom, innerHeight) + 1; }"
            )
            assert shown


async def test_drafts_of_a_diffusion_model_resolve(plain_model: Model) -> None:
    rig = Rig(*plain_model)
    for worker in rig.workers:
        worker.info.block_size = 4
    async with serving(rig) as (url, browser), opened(browser, url) as watched:
        page = watched.page
        await page.wait_for_selector("[name=model] option", state="attached")
        await page.evaluate(
            "window.seen = []; new MutationObserver(() => {"
            " const draft = document.querySelector('.draft');"
            " if (draft) window.seen.push(draft.querySelectorAll('.open').length);"
            "}).observe(document.querySelector('#columns'), {childList: true, subtree: true})"
        )
        await watched.say("hello")
        await watched.whole()
        assert await watched.answers() == [rig.answer]
        assert max(await page.evaluate("window.seen")) > 0, "no undecided token was shown"
        assert "rounds" in await page.inner_text(".figures")


async def test_tiles_follow_the_load(agent_model: Model) -> None:
    rig = agent_rig(*agent_model)
    async with serving(rig) as (url, browser), opened(browser, url) as watched:
        page = watched.page
        await watched.say("hello")
        await watched.whole()
        await page.click("#tab-fleet")
        await page.wait_for_selector("#workers .tile >> nth=1")
        assert await page.locator("#workers .dot.running").count() == 0
        assert await page.is_hidden("#agents")
        row = page.locator("#requests tr")
        assert await row.count() == 1
        cells = await row.locator("td").all_inner_texts()
        assert cells[2] in ("w0", "w1")
        assert cells[5] == "load: prompt not cached"
        rig.answer = LONG * 3
        chats = [asyncio.create_task(rig.chat(f"number {n}")) for n in range(6)]
        await page.wait_for_selector("#workers .dot.running >> nth=5", state="attached")
        await page.wait_for_selector("#models .caption span:text-matches('^[1-9]')")
        for chat in chats:
            chat.cancel()
        await asyncio.gather(*chats, return_exceptions=True)
        await page.wait_for_selector("#workers .dot.running", state="detached")


async def test_agent_sessions_are_shown(
    agent_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.fleet.session_gate.PLAIN_TOKENS", 16)
    rig = agent_rig(*agent_model)
    gate = RoutingConfig(max_session_wait_s=600.0)
    async with serving(rig, routing=gate) as (url, browser), opened(browser, url) as watched:
        page = watched.page
        await page.click("#tab-fleet")
        await page.wait_for_selector("#agents", state="visible")
        assert await page.locator("#sessions tr").count() == 0
        body = {"model": "stub", "messages": [{"role": "user", "content": LONG}]}
        headers = {"x-session-id": "secret"}
        await rig.client.post("/v1/chat/completions", json=body, headers=headers)
        cells = page.locator("#sessions tr td")
        await page.wait_for_selector("#sessions td:text-matches('^idle')")
        assert (await cells.all_inner_texts())[3] in ("w0", "w1")
        assert "1 live" in await page.inner_text("#sessions-summary")


async def test_adapters_are_shown_with_the_workers_that_have_them(agent_model: Model) -> None:
    rig = agent_rig(*agent_model)
    route = replace(rig.config.models[0], enable_lora=True)
    rig.config = replace(rig.config, models=(route,))
    for worker in rig.workers:
        worker.folders["/french"] = "v1"
        worker.info.max_loras = 4
        worker.adapters = AdapterTotals(on_device=["v1"], on_host=["v1"])
    rig.workers[1].adapters = AdapterTotals(on_host=["v1"])
    async with (
        serving(rig, admin_api_key="omega") as (url, browser),
        opened(browser, url) as watched,
    ):
        page = watched.page
        await page.click("#tab-fleet")
        await page.wait_for_selector("#workers dd:text-is('1 of 4')")
        assert await page.is_hidden("#lora")
        body = {"lora_name": "french", "lora_path": "/french"}
        headers = {"authorization": "Bearer omega"}
        await rig.client.post("/v1/load_lora_adapter", json=body, headers=headers)
        await page.wait_for_selector("#lora", state="visible")
        cells = await page.locator("#adapters td").all_inner_texts()
        assert cells == ["french", "stub", "w0", "w0, w1"]


SCRAPE = """\
rayfleet_worker_ready{model_name="m",worker_id="w"} 1
rayfleet_num_workers_ready{model_name="m",gateway_id="g"} 1
rayfleet_worker_time_to_first_token_seconds_count{model_name="m",worker_id="w"} COUNT
rayfleet_worker_time_to_first_token_seconds_sum{model_name="m",worker_id="w"} SECONDS
rayfleet_prefix_cache_queries_total{model_name="m",worker_id="w"} 1COUNT
rayfleet_prefix_cache_hits_total{model_name="m",worker_id="w"} COUNT
rayfleet_prompt_tokens_total{model_name="m",gateway_id="g"} 1COUNT
rayfleet_prompt_tokens_cached_total{model_name="m",gateway_id="g"} COUNT
rayfleet_slo_requests_total{model_name="m",gateway_id="g",met="true"} COUNT
"""


async def test_an_idle_fleet_shows_last_known_values(agent_model: Model) -> None:
    rig = agent_rig(*agent_model)
    async with serving(rig) as (url, browser), opened(browser, url) as watched:
        page = watched.page

        async def shown(*totals: tuple[str, str]) -> list[Any]:
            """Values after one scrape per second, with these totals of requests and seconds."""
            texts = [SCRAPE.replace("COUNT", n).replace("SECONDS", s) for n, s in totals]
            found = await page.evaluate(
                "async (texts) => { const { Fleet } = await import('./ui/metrics.js');"
                " const fleet = new Fleet(); texts.forEach((text, i) => fleet.take(text, i));"
                " const [{ ttftMs, hitRate }] = fleet.workers; const [model] = fleet.models;"
                " return [ttftMs, hitRate, model.hitRate, model.sloMet]; }",
                texts,
            )
            return list(found)

        assert await shown(("0", "0")) == [None, 0, 0, None], "no request has ended yet"
        since_start = [250, 4 / 14, 4 / 14, 1]
        assert await shown(("4", "1")) == since_start
        assert await shown(*[("4", "1")] * 9) == since_start
        # 8 requests took 0.4 s, which remains visible after they have ended.
        busy = [("1", "1"), ("9", "1.4")]
        last_interval = [pytest.approx(50), 1, 1, 1]
        assert await shown(*busy) == last_interval
        assert await shown(*busy, *[("9", "1.4")] * 9) == last_interval
        # A restarted worker counts from 0.
        assert await shown(*busy, ("2", "0.2")) == [pytest.approx(100), 2 / 12, 2 / 12, 1]
        # The tiles show them: a fleet that has served a request never shows "–" again.
        await watched.say("hello")
        await watched.whole()
        await page.click("#tab-fleet")
        cached = page.locator("#models dt:text-is('Prompt tokens cached') + dd")
        for _ in range(3):
            async with page.expect_response("**/metrics"):
                pass
            assert await cached.inner_text() == "0 %"


async def test_the_key_is_requested_and_kept_for_this_tab_only(agent_model: Model) -> None:
    rig = agent_rig(*agent_model)
    async with serving(rig, api_keys=("alpha",)) as (url, browser), opened(browser, url) as watched:
        page = watched.page
        await page.wait_for_selector("#key-dialog[open]")
        assert "stub" not in await page.content()
        await page.fill("#key", "wrong")
        await page.press("#key", "Enter")
        await page.wait_for_selector("#key-dialog[open]")
        await page.fill("#key", "alpha")
        await page.check("#keep-key")
        await page.click("#use-key")
        await page.wait_for_selector("[name=model] option", state="attached")
        await watched.say("hello")
        await watched.whole()
        assert await watched.answers() == [rig.answer]
        await page.reload()
        await page.wait_for_selector("[name=model] option", state="attached")
        assert await page.evaluate("Object.values(localStorage).join()") == ""
        assert "alpha" not in page.url


async def test_by_keyboard_alone(agent_model: Model) -> None:
    rig = agent_rig(*agent_model)
    async with serving(rig) as (url, browser), opened(browser, url) as watched:
        page = watched.page
        await page.keyboard.press("Tab")
        assert await page.evaluate("document.activeElement.className") == "skip"
        await page.keyboard.press("Tab")
        assert await page.evaluate("document.activeElement.id") == "tab-chat"
        await page.keyboard.press("ArrowRight")
        assert await page.is_visible("#fleet")
        await page.keyboard.press("ArrowRight")
        assert await page.is_visible("#chat")
        for _ in range(20):
            await page.keyboard.press("Tab")
            if await page.evaluate("document.activeElement.id") == "message":
                break
        await page.keyboard.type("hello")
        await page.keyboard.press("Enter")
        await watched.whole()
        assert await watched.answers() == [rig.answer]


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
async def test_axe_finds_no_serious_fault(
    agent_model: Model, theme: Any, width: int, tmp_path: Path
) -> None:
    rig = agent_rig(*agent_model)
    rig.answer = CALL
    context = {
        "color_scheme": theme,
        "viewport": {"width": width, "height": 800},
        "bypass_csp": True,  # axe-core's script is not the page's
    }
    async with serving(rig) as (url, browser), opened(browser, url, **context) as watched:
        page = watched.page
        await watched.settings(0, tools=TOOLS)
        await watched.say("What is 12 + 30?")
        await watched.whole()
        await assert_accessible(watched)
        await page.screenshot(path=tmp_path / "chat.png")
        await page.click("#tab-fleet")
        await page.wait_for_selector("#workers .tile")
        await assert_accessible(watched)
        await page.screenshot(path=tmp_path / "fleet.png")
        await page.click("#key-button")
        await assert_accessible(watched)
        wide = await page.evaluate("document.documentElement.scrollWidth > innerWidth")
        assert not wide, "it scrolls sideways"


async def assert_accessible(watched: Watched) -> None:
    found = (await Axe().run(watched.page)).response["violations"]
    faults = [
        (fault["id"], node["html"])
        for fault in found
        if fault["impact"] in SERIOUS
        for node in fault["nodes"]
    ]
    assert not faults
