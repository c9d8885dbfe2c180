"""`rayfleet chat` and `rayfleet complete` against a gateway behind a real HTTP server."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.cli.chat import Chat, ChatOptions, printable
from cluster.cli.endpoint import Endpoint, EndpointOptions
from cluster.cli.main import build_parser
from tests.support.router.rig import Rig, build_checkpoint
from worker.protocol.text.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    build_checkpoint(folder)
    return folder


@pytest.fixture
async def rig(folder: Path) -> AsyncIterator[Rig]:
    rig = Rig(folder, load_tokenizer(str(folder)))
    yield rig
    await rig.stop()


Run = Callable[..., Any]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command in a thread with these lines as input."""

    async def run(url: str, *argv: str, lines: str = "") -> int:
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        arguments = build_parser().parse_args([*argv, "--url", url])
        return int(await asyncio.to_thread(arguments.run, arguments))

    return run


def prompts_of(rig: Rig) -> list[str]:
    ids = [np.frombuffer(submit.prompt, "<i4").tolist() for submit in rig.submits()]
    return [rig.tokenizer.decode(each, skip_special_tokens=False) for each in ids]


async def test_a_chat_is_streamed_with_previous_messages(
    rig: Rig, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    await rig.start()
    async with rig.server() as url:
        lines = "hello there\nthe answer?\n\n/reset\none two\n"
        assert await run(url, "chat", "--system", "the system", lines=lines) == 0
    assert capsys.readouterr().out == f"{rig.answer}\n" * 3
    first, second, third = prompts_of(rig)
    assert "the system" in first
    assert "hello there" in first
    for text in ("the system", "hello there", rig.answer, "the answer?"):
        assert text in second
    assert "hello there" not in third
    assert "the system" in third


async def test_a_single_message_is_sent_with_the_given_parameters(
    rig: Rig, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    await rig.start()
    async with rig.server() as url:
        flags = ("--model", "alias", "--temperature", "0", "--max-tokens", "3", "--seed", "7")
        assert await run(f"{url}/v1/", "chat", "hello", *flags) == 0
    [submit] = rig.submits()
    assert (submit.sampling.temperature, submit.sampling.max_tokens, submit.seed) == (0.0, 3, 7)
    assert capsys.readouterr().out.count("\n") == 1


async def test_prompts_are_completed(
    rig: Rig, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    await rig.start()
    async with rig.server() as url:
        assert await run(url, "complete", "hello", "--max-tokens", "100") == 0
        assert await run(url, "complete", "--max-tokens", "100", lines="one\ntwo\n") == 0
    assert capsys.readouterr().out == f"{rig.answer}\n" * 3
    assert sorted(prompts_of(rig)) == ["hello", "one", "two"]  # listed by worker


async def test_keys_are_read_from_flag_or_environment(
    rig: Rig, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.start(api_keys=("alpha",))
    async with rig.server() as url:
        with pytest.raises(ValueError, match="set RAYFLEET_API_KEY or --api-key"):
            await run(url, "chat", "hello")
        assert await run(url, "chat", "hello", "--api-key", "alpha") == 0
        monkeypatch.setenv("RAYFLEET_API_KEY", "alpha,omega")
        assert await run(url, "chat", "hello") == 0


async def test_errors_are_single_lines(
    rig: Rig, run: Run, capsys: pytest.CaptureFixture[str], unused_tcp_port: int
) -> None:
    with pytest.raises(ValueError, match="start a server with `rayfleet serve`"):
        await run(f"http://127.0.0.1:{unused_tcp_port}", "chat", "hello")
    with pytest.raises(ValueError, match="--url must be a URL"):
        await run("localhost:8000", "chat", "hello")
    await rig.start()
    async with rig.server() as url:
        with pytest.raises(ValueError, match=r"no model 'other' at .*: choose from stub, alias"):
            await run(url, "chat", "hello", "--model", "other")
        # In a chat the next message may do better; a script sees it by the exit code.
        assert await run(url, "chat", "--top-p", "9", lines="hello\nagain\n") == 1
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2
    assert all(line.startswith("rayfleet: ") for line in errors)


async def test_commands_of_a_chat(rig: Rig, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    await rig.start()
    async with rig.server() as url:
        assert await run(url, "chat", lines="/help\n") == 0
        assert "/reset   start a new chat" in capsys.readouterr().out
        assert await run(url, "chat", lines="/rest\n/bye\n/etc/hosts is a file\n") == 1
        errors = capsys.readouterr().err.splitlines()
        assert errors == [
            "rayfleet: unknown command /rest: did you mean /reset?",
            "rayfleet: unknown command /bye: commands are /help, /reset, /quit, /exit",
        ]
        prompts = prompts_of(rig)
        for command in ("/quit", "/exit"):
            assert await run(url, "chat", lines=f"{command}\nnever sent\n") == 0
    assert prompts_of(rig) == prompts, "no command is sent as a message"
    assert "/etc/hosts is a file" in prompts[-1]


class Scripted(Endpoint):
    """An endpoint that answers with these events, and records requests."""

    def __init__(self, *events: dict[str, Any] | BaseException) -> None:
        super().__init__("http://scripted")
        self.events = events
        self.bodies: list[Any] = []

    def models(self) -> list[str]:
        return ["m"]

    def stream(self, path: str, body: Any) -> Any:
        self.bodies.append(json.loads(json.dumps(body)))
        for event in self.events:
            if isinstance(event, BaseException):
                raise event
            yield {"choices": [{"delta": event}]}
        yield {"choices": [], "usage": {}}


def test_the_part_of_a_stopped_response_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    endpoint = Scripted({"content": "half"}, KeyboardInterrupt())
    chat = Chat(endpoint, ChatOptions())
    chat.send("hello")
    assert chat.messages[-1] == {"role": "assistant", "content": "half"}
    assert capsys.readouterr().out == "half (stopped)\n"


def test_a_failed_message_is_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    chat = Chat(Scripted({"content": "ha"}, ValueError("lost")), ChatOptions(system="s"))
    with pytest.raises(ValueError, match="lost"):
        chat.send("hello")
    assert chat.messages == [{"role": "system", "content": "s"}]


def test_reasoning_is_dimmed_in_a_terminal_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = ({"reasoning": "hm"}, {"reasoning": "m"}, {"content": "42"})
    chat = Chat(Scripted(*pieces), ChatOptions())
    chat.send("hello")
    assert capsys.readouterr().out == "42\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    chat.send("hello")
    assert capsys.readouterr().out == "\x1b[2mhmm\x1b[0m\n42\n"
    assert chat.messages[-1]["content"] == "42"


def test_control_characters_are_removed() -> None:
    assert printable("a\x1b[2J\x07b\x9bc\r\n\té👩‍🚀") == "a[2Jbc\n\té👩‍🚀"


def test_a_key_is_not_in_the_representation(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "secret" not in repr(EndpointOptions(api_key="secret"))
    monkeypatch.setenv("RAYFLEET_API_KEY", "secret")
    assert EndpointOptions().key == "secret"
    assert EndpointOptions(api_key="other").key == "other"


@asynccontextmanager
async def raw_server(answer: bytes) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Server that responds with these bytes and closes the connection; its URL and requests."""
    came: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        yield f"http://{host}:{port}", came


async def test_keys_are_not_sent_to_redirects() -> None:
    """The redirect may point to any host."""
    found = b"HTTP/1.1 302 Found\r\nlocation: /v1/elsewhere\r\ncontent-length: 0\r\n\r\n"
    async with raw_server(found) as (url, came):
        with pytest.raises(ValueError, match="returned HTTP 302 Found"):
            await asyncio.to_thread(Endpoint(url, "secret").models)
    assert len(came) == 1


async def test_an_interrupted_response_is_a_single_line_error() -> None:
    """For example when the gateway queried by `rayfleet top` is replaced."""
    async with raw_server(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf") as (url, _):
        endpoint = Endpoint(url)
        for call in (endpoint.text, endpoint.get):
            with pytest.raises(ValueError, match="connection lost"):
                await asyncio.to_thread(call, "/metrics")
