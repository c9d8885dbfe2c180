"""Resolves `$ref` and `$dynamicRef` of a JSON schema within the document."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from worker.core.grammar.base import GrammarError
from worker.core.grammar.json_schema.values import malformed, unsupported

Json = Any

_ONE = (
    *("additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if"),
    *("items", "not", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"),
)
"""Keywords whose value is a schema."""
_MANY = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
"""Keywords whose value is a list of schemas."""
_NAMED = (
    *("$defs", "definitions", "dependencies", "dependentSchemas"),
    *("patternProperties", "properties"),
)
"""Keywords whose value is a mapping from names to schemas."""


class References:
    """Schemas of a document by address.

    Args:
        root: the document.
    """

    def __init__(self, root: Json) -> None:
        self._resources: dict[str, Json] = {"": root}
        """Schemas that have an identifier, by the address to which the identifier resolves."""
        self._anchors: dict[tuple[str, str], Json] = {}
        """Schemas by resource address and anchor."""
        self._bases: dict[int, str] = {}
        """Address of a schema's resource, by the schema's id()."""
        self._dynamic: dict[str, list[Json]] = {}
        """Schemas by dynamic anchor."""
        self._schemas: list[dict[str, Json]] = []
        pending: list[tuple[Json, str]] = [(root, "")]
        while pending:
            node, base = pending.pop()
            if isinstance(node, dict):
                base = self._register(node, base)
                self._schemas.append(node)
                pending += [(part, base) for part in _subschemas(node)]

    def find(self, schema: Mapping[str, Json], keyword: str) -> Json:
        """The schema to which a keyword of a schema refers.

        Raises:
            GrammarError: the target is not in the document.
        """
        given = schema[keyword]
        if not isinstance(given, str):
            raise malformed(keyword, "a string", given)
        base = self._bases.get(id(schema), "")
        address, fragment = urldefrag(urljoin(base, given) if given[:1] != "#" else base + given)
        if address not in self._resources:
            raise unsupported(keyword, f"refers to {given!r:.200}, which is not in this schema")
        if keyword == "$dynamicRef" and len(self._dynamic.get(fragment, ())) > 1:
            raise unsupported(keyword, f"to {given!r:.200} is not supported: several anchors match")
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            found = self._anchors.get((address, fragment))
        else:
            found = self._at(address, fragment)
        if not isinstance(found, (dict, bool)):
            raise unsupported(keyword, f"refers to {given!r:.200}, which is not a schema")
        return found

    def check_loops(self) -> None:
        """Raises GrammarError if a schema applies itself, directly or indirectly, to the same
        value."""
        finished: set[int] = set()
        for start in self._schemas:
            path: set[int] = set()
            pending: list[tuple[dict[str, Json], bool]] = [(start, False)]
            while pending:
                node, is_left = pending.pop()
                if is_left:
                    path.discard(id(node))
                    finished.add(id(node))
                elif id(node) in path:
                    name = f" {node['$ref']!r:.80}" if "$ref" in node else ""
                    raise GrammarError(f"JSON schema: circular $ref{name}: remove the cycle")
                elif id(node) not in finished:
                    path.add(id(node))
                    pending.append((node, True))
                    pending += [(part, False) for part in self._in_place(node)]

    def _in_place(self, node: dict[str, Json]) -> list[dict[str, Json]]:
        """Schemas that a schema applies to the same value as itself."""
        parts = [node.get(name) for name in ("if", "then", "else", "not")]
        for name in ("allOf", "anyOf", "oneOf"):
            if isinstance(node.get(name), list):
                parts += node[name]
        for name in ("dependentSchemas", "dependencies"):
            if isinstance(node.get(name), dict):
                parts += node[name].values()
        for name in ("$ref", "$dynamicRef"):
            if name in node:
                with contextlib.suppress(GrammarError):  # raised when it is used
                    parts.append(self.find(node, name))
        return [part for part in parts if isinstance(part, dict)]

    def _register(self, node: dict[str, Json], base: str) -> str:
        """Records a schema's address and anchors; returns the address of its resource."""
        identifier = node.get("$id")
        if isinstance(identifier, str) and not identifier.startswith("#"):
            base = urldefrag(urljoin(base, identifier))[0]
            self._resources.setdefault(base, node)
        elif isinstance(identifier, str):  # an anchor in drafts before 2019-09
            self._anchors.setdefault((base, identifier[1:]), node)
        self._bases.setdefault(id(node), base)
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(name := node.get(keyword), str):
                self._anchors.setdefault((base, name), node)
                if keyword == "$dynamicAnchor":
                    self._dynamic.setdefault(name, []).append(node)
        return base

    def _at(self, address: str, pointer: str) -> Json:
        """Value at a JSON pointer in a resource; None if there is none."""
        node = self._resources[address]
        for part in pointer.split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(node, dict):
                node = node.get(name)
            elif isinstance(node, list) and name.isdecimal() and int(name) < len(node):
                node = node[int(name)]
            else:
                return None
        if isinstance(node, dict):
            self._bases.setdefault(id(node), address)
        return node


def _subschemas(node: Mapping[str, Json]) -> Iterator[Json]:
    for keyword in _ONE:
        if isinstance(node.get(keyword), dict):
            yield node[keyword]
    for keyword in _MANY:
        if isinstance(node.get(keyword), list):
            yield from node[keyword]
    for keyword in _NAMED:
        if isinstance(node.get(keyword), dict):
            yield from node[keyword].values()
