"""Renders the chat templates of checkpoints with Jinja in a sandbox, with the helpers that
templates expect."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence, Set
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplate:
    """Compiled chat template. Rendering is thread-safe.

    Templates come with checkpoints and are untrusted: they run in Jinja's immutable sandbox and
    only receive plain JSON data.

    Raises:
        ValueError: the template has a syntax error.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        """Jinja source of the template."""
        self._special_tokens = dict(special_tokens)
        try:
            self._template, variables = _compiled(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(
                f"syntax error in line {error.lineno} of the chat template ({error.message}): fix "
                "it, or set another template with --chat-template"
            ) from error
        in_message = "tools" not in variables and _MESSAGE_TOOLS.search(source) is not None
        self._reads_message_tools = in_message
        """Whether the template reads tools from a field of the system message, as in Phi-4-mini."""

    def quotes(self, word: str) -> bool:
        """Whether the source contains `word` as a quoted string, such as the name of a role or
        field."""
        return f"'{word}'" in self.source or f'"{word}"' in self.source

    def fields(self, *names: str) -> tuple[str, ...]:
        """Selects the `names` that the source accesses as fields of an object: `x.name`,
        `x['name']`."""
        return tuple(
            name
            for name in names
            if self.quotes(name) or re.search(rf"\.{re.escape(name)}\b", self.source)
        )

    def reads(self, *variables: str) -> bool:
        """Whether the source contains one of `variables` as a word."""
        return any(re.search(rf"\b{re.escape(name)}\b", self.source) for name in variables)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Renders the prompt text. Raises ValueError if the template rejects the messages."""
        values: dict[str, Any] = {**self._special_tokens, **variables}
        if tools and self._reads_message_tools:
            messages = _with_tools(messages, tools)
        values["messages"] = messages
        values["tools"] = tools
        values["add_generation_prompt"] = add_generation_prompt
        try:
            return self._template.render(values)
        except (jinja2.TemplateError, TypeError, ArithmeticError, LookupError) as error:
            raise ValueError(f"the chat template rejected the messages: {error}") from error


_MESSAGE_TOOLS = re.compile(r"""message(?:\.tools\b|\[['"]tools['"]\])""")


def _with_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Messages with the functions of `tools` as JSON in the system message's field `tools`."""
    written = _tojson([tool["function"] for tool in tools])
    has_system = bool(messages) and messages[0].get("role") == "system"
    first = messages[0] if has_system else {"role": "system", "content": ""}
    return [{**first, "tools": written}, *messages[has_system:]]


class _GenerationTag(Extension):
    """Tag `{% generation %}`, which marks assistant text for training. Its body is rendered
    as is."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it as an instance attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Replaces the block with its body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=8)
def _compiled(source: str) -> tuple[jinja2.Template, Set[str]]:
    """Compiles a template; also returns its undeclared variables. Cached, since models of one
    family often share their template."""
    environment = _environment()
    tree = environment.parse(source)
    variables = meta.find_undeclared_variables(tree)
    return environment.from_string(tree), variables


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    helpers: dict[str, Callable[..., Any]] = {
        "raise_exception": _raise_exception,
        "strftime_now": lambda pattern: datetime.now().strftime(pattern),
    }
    environment.globals.update(helpers)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Filter `tojson`, which, unlike Jinja's, does not escape HTML characters."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
