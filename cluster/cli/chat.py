"""`rayfleet chat` and `rayfleet complete`: generate text with an endpoint from a terminal."""

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
    "/help": "list commands",
    "/reset": "start a new chat",
    "/quit": "end the chat (also Ctrl-D)",
    "/exit": "end the chat (same as /quit)",
}
"""Commands of a chat, with their help."""
_COMMAND = re.compile(r"/\w+")
"""Pattern of commands; a path or other text that starts with a slash is a message."""
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
"""Escape sequences before and after reasoning in a terminal."""
_C1 = range(0x7F, 0xA0)
"""DEL and the C1 control characters; the C0 control characters are those below the space."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationOptions(EndpointOptions):
    """Options of `chat` and `complete`: model and sampling parameters."""

    model: str = ""
    """Name of the model; the first one served by the endpoint if unset."""
    max_tokens: int | None = None
    """Maximum number of tokens to generate per response."""
    temperature: float | None = None
    """Sampling temperature; 0 is greedy. If unset, the server uses the default of the model's
    generation_config.json."""
    top_p: float | None = None
    """Nucleus sampling: sample from the smallest set of most likely tokens whose cumulative
    probability reaches this value."""
    seed: int | None = None
    """Random seed; the same seed and prompt give the same response."""

    @property
    def sampling(self) -> dict[str, Any]:
        """Sampling parameters that are set, as fields of a request."""
        parameters = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
        }
        return {name: value for name, value in parameters.items() if value is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatOptions(GenerationOptions):
    """Options of `chat`."""

    system: str = ""
    """System message of the chat."""


def add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `rayfleet chat` to its parser."""
    commands = ", ".join(f"{name}: {text}" for name, text in COMMANDS.items())
    parser.description = (
        "Interactive chat with a model. Each line is sent as a message with the chat history, and "
        f"responses are streamed. Commands: {commands}. Ctrl-C stops a response."
    )
    parser.add_argument("message", nargs="?", help="send this message only, then exit")
    add_options(parser, ChatOptions)
    parser.set_defaults(run=run_chat)


def add_complete_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `rayfleet complete` to its parser."""
    parser.description = "Completes a prompt, or each line of standard input if no prompt is given."
    parser.add_argument("prompt", nargs="?", help="prompt to complete")
    add_options(parser, GenerationOptions)
    parser.set_defaults(run=run_complete)


def run_chat(arguments: argparse.Namespace) -> int:
    """Sends one message, or chats until the input ends; returns the exit code."""
    options = ChatOptions(**given_options(arguments, ChatOptions))
    chat = Chat(Endpoint(options.url, options.key), options)
    if arguments.message is not None:
        chat.send(arguments.message)
        return 0
    return _converse(chat.model, chat.handle_line, f"{', '.join(COMMANDS)}; Ctrl-D ends")


def run_complete(arguments: argparse.Namespace) -> int:
    """Completes one text, or each line of the input; returns the exit code."""
    options = GenerationOptions(**given_options(arguments, GenerationOptions))
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
    """A conversation with one model. Each new message is sent with the whole conversation.

    Args:
        endpoint: endpoint that serves the model.
        options: model, sampling parameters and system message.

    Raises:
        ValueError: the endpoint is unreachable, or the model (or any model, if unset) is not
            available to the API key.
    """

    def __init__(self, endpoint: Endpoint, options: ChatOptions) -> None:
        self._endpoint = endpoint
        self._options = options
        self.model = _model_of(endpoint, options)
        self.messages: list[dict[str, str]] = []
        """The messages so far, the system message first."""
        self._reset()

    def send(self, text: str) -> None:
        """Sends a message, prints the response, and adds the message and the response to the
        conversation.

        If Ctrl-C stops the response, the part that was printed is kept. If the request fails,
        nothing is added.

        Raises:
            ValueError: the endpoint rejects the request, or fails.
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

    def handle_line(self, line: str) -> None:
        """Runs a line as a command, or sends it as a message.

        Raises:
            ValueError: the command is unknown, or `send` failed.
            EOFError: the command ends the chat.
        """
        match line:
            case "/help":
                _write("".join(f"{name:8} {text}\n" for name, text in COMMANDS.items()))
            case "/reset":
                self._reset()
            case "/quit" | "/exit":
                raise EOFError
            case _ if _COMMAND.fullmatch(line):
                raise ValueError(f"unknown command {line}: {_suggestion(line)}")
            case _:
                self.send(line)

    def _reset(self) -> None:
        system = self._options.system
        self.messages = [{"role": "system", "content": system}] if system else []


def _suggestion(line: str) -> str:
    matches = difflib.get_close_matches(line, COMMANDS, 1)
    return f"did you mean {matches[0]}?" if matches else f"commands are {', '.join(COMMANDS)}"


def _model_of(endpoint: Endpoint, options: GenerationOptions) -> str:
    names = endpoint.models()
    if not names:
        raise ValueError(
            f"no model at {endpoint.base} is available to this API key: use another --api-key"
        )
    if options.model and options.model not in names:
        raise ValueError(
            f"no model {options.model!r} at {endpoint.base}: choose from {', '.join(names)}"
        )
    return options.model or names[0]


def _converse(model: str, handle: Callable[[str], None], hint: str = "Ctrl-D ends") -> int:
    """Calls `handle` with each line of standard input, and prints its errors.

    Returns the exit code: 1 if a line failed and the input is not a terminal.
    """
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401  # arrows and history in `input`

        print(f"model {model}; {hint}", file=sys.stderr)
    code = 0
    while True:
        try:
            line = input("> " if is_terminal else "").strip()
        except (EOFError, KeyboardInterrupt):
            return code
        try:
            if line:
                handle(line)
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
    """Prints a response as it is streamed, until it ends or Ctrl-C is pressed; returns its text
    without reasoning.

    Reasoning is printed only to a terminal.
    """
    answer, in_reasoning = [], False
    try:
        for piece in pieces:
            if (reasoning := piece.get("reasoning")) and sys.stdout.isatty():
                _write(f"{'' if in_reasoning else _DIM}{printable(reasoning)}")
                in_reasoning = True
            if text := piece.get("content") or piece.get("text"):
                _write(f"{_PLAIN + chr(10) if in_reasoning else ''}{printable(text)}")
                in_reasoning = False
                answer.append(text)
    except KeyboardInterrupt:
        _write(" (stopped)")
    _write(f"{_PLAIN if in_reasoning else ''}\n")
    return "".join(answer)


def printable(text: str) -> str:
    """`text` without control characters: escape sequences in it would control the terminal."""
    return "".join(c for c in text if c in "\n\t" or (c >= " " and ord(c) not in _C1))


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
