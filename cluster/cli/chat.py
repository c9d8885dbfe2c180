"""`rayfleet chat` and `rayfleet complete`: talk to an endpoint from a terminal."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from cluster.cli.endpoint import Endpoint, EndpointOptions
from cluster.cli.options import add_options, given_options

COMMANDS = {
    "/help": "list these commands",
    "/reset": "begin a new chat",
    "/quit": "end, as Ctrl-D does",
}
"""Lines that are commands in a chat, and what they do."""
_COMMAND = re.compile(r"/\w+")
"""Lines that are taken for commands: a path or a text behind a slash is a message."""
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
"""Escape sequences before and after reasoning in a terminal."""
_C1 = range(0x7F, 0xA0)
"""DEL and the C1 control characters; those of C0 are below the space."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AskOptions(EndpointOptions):
    """Options of `chat` and `complete`: model and sampling parameters."""

    model: str = ""
    """Model to ask; the first one that the endpoint has unless given."""
    max_tokens: int | None = None
    """Most tokens of an answer."""
    temperature: float | None = None
    """Sampling temperature; the one that the model's checkpoint recommends unless given. 0 always
    takes the likeliest token."""
    top_p: float | None = None
    """Nucleus sampling: from the likeliest tokens whose probabilities sum up to this."""
    seed: int | None = None
    """Seed of sampling: the same one gives the same answer to the same prompt."""

    @property
    def sampling(self) -> dict[str, Any]:
        """Sampling parameters that were given, as fields of a request."""
        named = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
        }
        return {name: value for name, value in named.items() if value is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatOptions(AskOptions):
    """Options of `chat`."""

    system: str = ""
    """System message that the chat begins with."""


def add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    """Fills the parser of `rayfleet chat`."""
    commands = ", ".join(f"{name}: {what}" for name, what in COMMANDS.items())
    parser.description = (
        "Chats with a model. Each line is a message; answers are streamed, and the chat is "
        f"remembered. Commands are {commands}. Ctrl-C stops an answer, Ctrl-D ends."
    )
    parser.add_argument("message", nargs="?", help="asked alone, without a chat that follows")
    add_options(parser, ChatOptions)
    parser.set_defaults(run=run_chat)


def add_complete_arguments(parser: argparse.ArgumentParser) -> None:
    """Fills the parser of `rayfleet complete`."""
    parser.description = "Continues a text; without one, each line of the input is a text."
    parser.add_argument("prompt", nargs="?", help="the text")
    add_options(parser, AskOptions)
    parser.set_defaults(run=run_complete)


def run_chat(arguments: argparse.Namespace) -> int:
    """Chats until the input ends; returns the exit code."""
    options = ChatOptions(**given_options(arguments, ChatOptions))
    chat = Chat(Endpoint(options.url, options.key), options)
    if arguments.message is not None:
        chat.ask(arguments.message)
        return 0
    return _converse(chat.model, chat.take_line, f"{', '.join(COMMANDS)}; Ctrl-D ends")


def run_complete(arguments: argparse.Namespace) -> int:
    """Completes one text, or each line of the input; returns the exit code."""
    options = AskOptions(**given_options(arguments, AskOptions))
    endpoint = Endpoint(options.url, options.key)
    model = _model_of(endpoint, options)

    def complete(prompt: str) -> None:
        body = {"model": model, "prompt": prompt, **options.sampling}
        _show(_choices(endpoint.stream("/v1/completions", body)))

    if arguments.prompt is not None:
        complete(arguments.prompt)
        return 0
    return _converse(model, complete)


class Chat:
    """A conversation with one model, whose messages are kept and sent with each question.

    Args:
        endpoint: endpoint that serves the model.
        options: model, sampling parameters and system message.

    Raises:
        ValueError: the endpoint does not answer, or has no model for this key.
    """

    def __init__(self, endpoint: Endpoint, options: ChatOptions) -> None:
        self._endpoint = endpoint
        self._options = options
        self.model = _model_of(endpoint, options)
        self.messages: list[dict[str, str]] = []
        """The messages so far, the system message first."""
        self._forget()

    def ask(self, text: str) -> None:
        """Sends a message and shows the answer; both are kept.

        Of an answer that Ctrl-C stops, the part that was shown is kept; one that fails is dropped,
        and so is its question.

        Raises:
            ValueError: the endpoint refuses the request, or fails.
        """
        self.messages.append({"role": "user", "content": text})
        body = {"model": self.model, "messages": self.messages, **self._options.sampling}
        events = self._endpoint.stream("/v1/chat/completions", body)
        try:
            answer = _show(choice["delta"] for choice in _choices(events))
        except ValueError:
            self.messages.pop()
            raise
        self.messages.append({"role": "assistant", "content": answer})

    def take_line(self, line: str) -> None:
        """Runs a typed line if it is a command; sends any other line as a message.

        Raises:
            ValueError: the line begins as a command does, and is none; or as `ask` raises it.
            EOFError: the command ends the chat.
        """
        match line:
            case "/help":
                _write("".join(f"{name:8} {what}\n" for name, what in COMMANDS.items()))
            case "/reset":
                self._forget()
            case "/quit":
                raise EOFError
            case _ if _COMMAND.fullmatch(line):
                raise ValueError(f"unknown command {line}: {_suggestion(line)}")
            case _:
                self.ask(line)

    def _forget(self) -> None:
        system = self._options.system
        self.messages = [{"role": "system", "content": system}] if system else []


def _suggestion(line: str) -> str:
    meant = difflib.get_close_matches(line, COMMANDS, 1)
    return f"did you mean {meant[0]}?" if meant else f"commands are {', '.join(COMMANDS)}"


def _model_of(endpoint: Endpoint, options: AskOptions) -> str:
    names = endpoint.models()
    if options.model and options.model not in names:
        raise ValueError(f"no model {options.model} at {endpoint.base}: {', '.join(names)}")
    if not names:
        raise ValueError(f"this key may use no model at {endpoint.base}")
    return options.model or names[0]


def _converse(model: str, take: Callable[[str], None], hint: str = "Ctrl-D ends") -> int:
    """Calls `take` with each line of the input until it ends, and prints errors of lines.

    Returns the exit code: 1 if one failed and the input is no terminal.
    """
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401  # arrows and history in `input`

        print(f"{model} answers; {hint}", file=sys.stderr)
    code = 0
    while True:
        try:
            line = input("> " if is_terminal else "").strip()
        except (EOFError, KeyboardInterrupt):
            return code
        try:
            if line:
                take(line)
        except EOFError:
            return code
        except ValueError as error:
            print(f"rayfleet: {error}", file=sys.stderr)
            code = 0 if is_terminal else 1


def _choices(events: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The first choice of each event that has one."""
    for event in events:
        if event.get("choices"):
            yield event["choices"][0]


def _show(pieces: Iterable[dict[str, Any]]) -> str:
    """Writes an answer as it is streamed, until its end or Ctrl-C; returns it without reasoning.

    Reasoning is shown in a terminal alone.
    """
    answer, thinks = [], False
    try:
        for piece in pieces:
            if (thought := piece.get("reasoning")) and sys.stdout.isatty():
                _write(f"{'' if thinks else _DIM}{printable(thought)}")
                thinks = True
            if text := piece.get("content") or piece.get("text"):
                _write(f"{_PLAIN + chr(10) if thinks else ''}{printable(text)}")
                thinks = False
                answer.append(text)
    except KeyboardInterrupt:
        _write(" (stopped)")
    _write(f"{_PLAIN if thinks else ''}\n")
    return "".join(answer)


def printable(text: str) -> str:
    """`text` without control characters: a model's escape sequences would steer the terminal."""
    return "".join(c for c in text if c in "\n\t" or (c >= " " and ord(c) not in _C1))


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
