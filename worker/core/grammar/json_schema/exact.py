"""Rewrites a JSON schema to one that llguidance enforces exactly.

llguidance ignores some keywords, and interprets others slightly differently (rounded bounds,
character classes in patterns). The rewritten schema never allows more than the original, and only
excludes uncommon forms of valid values (100.0 for an integer). Schemas that cannot be rewritten are
rejected with an error that names the keyword.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from worker.core.grammar.base import GrammarError
from worker.core.grammar.json_schema import names, numbers
from worker.core.grammar.json_schema.exclusive import TYPES, Exclusion, types_of
from worker.core.grammar.json_schema.formats import FORMATS, UNSUPPORTED
from worker.core.grammar.json_schema.patterns import NOT_ASCII, translated
from worker.core.grammar.json_schema.references import References
from worker.core.grammar.json_schema.values import (
    an_array,
    an_object,
    checked_value,
    count,
    malformed,
    texts,
    unsupported,
)

Json = Any
Schema = bool | dict[str, Any]

_BEFORE_2019 = ("draft-03/", "draft-04/", "draft-06/", "draft-07/")
_IN_PLACE = ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf")
_APPLICATORS = (*_IN_PLACE, "if", "not", "dependentSchemas", "dependencies")
_PREFIX = "#/$defs/"


def exact_schema(schema: Json) -> dict[str, Any]:
    """Rewrites the schema of a document.

    Raises:
        GrammarError: the schema is malformed, or has a keyword that cannot be enforced.
    """
    return _Rewriting(schema).document()


class _Rewriting:
    def __init__(self, root: Json) -> None:
        self._root = root
        self._references = References(root)
        self._exclusion = Exclusion(self._references)
        self._names: dict[int, str] = {}
        """Names of referenced schemas in the rewritten document's $defs, by the schema's id()."""
        self._pending: list[tuple[str, Json]] = []
        dialect = root.get("$schema") if isinstance(root, dict) else None
        self._refs_are_alone = isinstance(dialect, str) and any(
            draft in dialect for draft in _BEFORE_2019
        )
        """Whether siblings of `$ref` are ignored."""

    def document(self) -> dict[str, Any]:
        """The rewritten document, with all referenced schemas in its $defs."""
        self._references.check_loops()
        rewritten = self.schema(self._root)
        if rewritten is False:
            raise GrammarError("JSON schema: no value can satisfy the schema")
        definitions: dict[str, Schema] = {}
        while self._pending:
            name, found = self._pending.pop()
            definitions[name] = self.schema(found)
        document = {} if rewritten is True else rewritten
        return {**document, "$defs": definitions} if definitions else document

    def schema(self, given: Json) -> Schema:
        """Rewrites one schema."""
        if isinstance(given, bool):
            return given
        if not isinstance(given, dict):
            raise GrammarError(
                "JSON schema: each schema must be an object or a boolean, got "
                f"{json.dumps(given):.80}"
            )
        if self._refs_are_alone and "$ref" in given:
            return self._reference(given, "$ref")
        part = _Part(given, self)
        return part.rewritten()

    def _reference(self, given: Mapping[str, Json], keyword: str) -> Schema:
        found = self._references.find(given, keyword)
        if isinstance(found, bool):
            return found
        name = self._names.get(id(found))
        if name is None:
            name = self._names[id(found)] = f"d{len(self._names)}"
            self._pending.append((name, found))
        return {"$ref": _PREFIX + name}

    def reference(self, given: Mapping[str, Json], keyword: str) -> Schema:
        """A `$ref` to the rewritten form of the schema to which `keyword` refers."""
        return self._reference(given, keyword)

    def target(self, given: Mapping[str, Json], keyword: str) -> Json:
        """The original schema to which `keyword` of the schema `given` refers."""
        return self._references.find(given, keyword)

    def are_exclusive(self, alternatives: list[Json]) -> bool:
        """Whether no value is valid under more than one of the original schemas `alternatives`."""
        return all(
            self._exclusion.are_exclusive(schema, other)
            for number, schema in enumerate(alternatives)
            for other in alternatives[number + 1 :]
        )


class _Part:
    """Rewrites one schema.

    Args:
        given: the original schema.
        whole: the rewriting of the document that contains it.
    """

    def __init__(self, given: dict[str, Json], whole: _Rewriting) -> None:
        self.given = given
        self.whole = whole
        self.types: frozenset[str] | None = None
        """Allowed types; None if all types are allowed."""
        self.out: dict[str, Json] = {}
        """Rewritten keywords that constrain values."""
        self.applied: dict[str, Json] = {}
        """Rewritten keywords that apply other schemas to the same value."""
        self.also: list[Schema] = []
        """Additional schemas that the value must match."""
        self.is_empty = False
        """Whether no value is valid."""

    def rewritten(self) -> Schema:
        self._types()
        self._not()
        self._conditions()
        self._numbers()
        self._strings()
        self._arrays()
        self._objects()
        self._dependencies()
        self._values()
        self._in_place()
        if self.is_empty or False in self.also:
            return False
        also = [schema for schema in self.also if schema is not True]
        if also:
            self.applied["allOf"] = [*self.applied.get("allOf", []), *also]
        if self.types is not None:
            self.out["type"] = sorted(self.types)
            if len(self.types) == 1:
                self.out["type"] = next(iter(self.types))
        # The first keyword determines the order of properties.
        first = next(iter(self.given), "")
        if first in _IN_PLACE:
            return {**self.applied, **self.out}
        return {**self.out, **self.applied}

    def _each(self, keyword: str) -> list[Schema]:
        given = an_array(self.given, keyword)
        if not given:
            raise malformed(keyword, "a non-empty array", given)
        return [self.whole.schema(part) for part in given]

    def _named(self, keyword: str) -> dict[str, Schema]:
        given = an_object(self.given, keyword)
        return {name: self.whole.schema(part) for name, part in given.items()}

    def _keep_types(self, types: frozenset[str]) -> None:
        self.types = types if self.types is None else self.types & types
        self.is_empty = self.is_empty or not self.types

    def _types(self) -> None:
        given = self.given.get("type")
        if given is None and "type" not in self.given:
            return
        listed: list[Any] = given if isinstance(given, list) else [given]
        if not listed or any(name not in TYPES for name in listed):
            raise malformed("type", f"one or more of {', '.join(TYPES)}", given)
        self.types = frozenset(listed)
        if "number" in self.types:
            self.types -= {"integer"}

    def _not(self) -> None:
        given = self.given.get("not", False)
        if given is False:
            return
        if not isinstance(given, (dict, bool)):
            raise malformed("not", "an object or a boolean", given)
        constraints = names.constraints(given) if isinstance(given, dict) else {}
        if not constraints:
            self.is_empty = True
        elif set(constraints) == {"type"}:
            self._not_types(constraints["type"])
        elif set(constraints) == {"required"} and len(texts(constraints, "required")) == 1:
            self._keep_types(frozenset({"object"}))
            self.also.append({"properties": {constraints["required"][0]: False}})
        else:
            raise unsupported("not", "is only supported with a type or a single required property")

    def _not_types(self, given: Json) -> None:
        excluded = set(given if isinstance(given, list) else [given])
        types = frozenset(TYPES) - {"integer"} if self.types is None else self.types
        if "integer" in excluded and "number" not in excluded and "number" in types:
            raise unsupported("not", "with type integer is not supported")
        if "number" in excluded:
            excluded.add("integer")
        self._keep_types(types - excluded)

    def _conditions(self) -> None:
        condition = self.given.get("if")
        if condition is None:
            return
        if condition in (True, {}, False):
            branch = "else" if condition is False else "then"
            self.also.append(self.whole.schema(self.given.get(branch, True)))
        elif any(self.given.get(name, True) not in (True, {}) for name in ("then", "else")):
            raise unsupported("if", "is not supported")

    def _values(self) -> None:
        if "const" in self.given:
            self.applied["const"] = checked_value(self.given["const"], "const")
        if "enum" in self.given:
            listed = [checked_value(value, "enum") for value in an_array(self.given, "enum")]
            self.applied["enum"] = listed
            self.is_empty = self.is_empty or not listed
        for keyword in ("const", "enum"):
            if keyword in self.applied:
                listed = self.applied["enum"] if keyword == "enum" else [self.applied["const"]]
                if self.types is not None:
                    types = self.types
                    listed = [value for value in listed if types_of(value) & types]
                if not listed:
                    self.is_empty = True
                elif keyword == "enum":
                    self.applied["enum"] = listed

    def _numbers(self) -> None:
        types = frozenset(TYPES) - {"integer"} if self.types is None else self.types
        if not types & {"number", "integer"}:
            return
        found = numbers.rewritten(self.given, is_integer="number" not in types)
        if found is None:
            self._keep_types(types - {"number", "integer"})
            return
        if found.is_integer and "number" in types:
            self.types = types - {"number"} | {"integer"}
        self.out.update(found.keywords)

    def _strings(self) -> None:
        if self.types is not None and "string" not in self.types:
            return
        for keyword in ("minLength", "maxLength"):
            if (bound := count(self.given, keyword)) is not None:
                self.out[keyword] = bound
        given = self.given.get("pattern")
        if given is not None:
            if not isinstance(given, str):
                raise malformed("pattern", "a string", given)
            self.out["pattern"] = translated(given)
        name = self.given.get("format")
        if isinstance(name, str) and name in UNSUPPORTED:
            raise unsupported("format", f"{name!r:.80} is not supported")
        if not isinstance(name, str) or name not in FORMATS:
            return
        pattern, longest = FORMATS[name]
        if "pattern" in self.out:
            self.also.append({"pattern": f"^(?:{pattern})$"})
        else:
            self.out["pattern"] = f"^(?:{pattern})$"
        if longest is not None:
            self.out["maxLength"] = min(longest, self.out.get("maxLength", longest))

    def _arrays(self) -> None:
        if self.types is not None and "array" not in self.types:
            return
        for keyword in ("minItems", "maxItems"):
            if (bound := count(self.given, keyword)) is not None:
                self.out[keyword] = bound
        longest = self.out.get("maxItems")
        unique = self.given.get("uniqueItems", False)
        if unique is not False and (longest is None or longest > 1):
            raise unsupported("uniqueItems", "is not supported")
        if "contains" in self.given and not (
            self.given.get("minContains") == 0 and "maxContains" not in self.given
        ):
            raise unsupported("contains", "is not supported")
        items = self.given.get("items")
        if isinstance(items, list):
            self.out["prefixItems"] = [self.whole.schema(item) for item in items]
            rest = "additionalItems"
        else:
            if "prefixItems" in self.given:
                self.out["prefixItems"] = self._each("prefixItems")
            rest = "items"
        if rest in self.given:
            self.out["items"] = self.whole.schema(self.given[rest])
        self._unevaluated_items()

    def _unevaluated_items(self) -> None:
        unevaluated = self.given.get("unevaluatedItems", True)
        if unevaluated in (True, {}) or "items" in self.out:
            return
        if any(name in self.given for name in (*_APPLICATORS, "contains")):
            raise unsupported(
                "unevaluatedItems",
                "is not supported together with keywords such as allOf or contains",
            )
        self.out["items"] = self.whole.schema(unevaluated)

    def _objects(self) -> None:
        if self.types is not None and "object" not in self.types:
            return
        if "properties" in self.given:
            self.out["properties"] = self._named("properties")
        if "patternProperties" in self.given:
            is_open = self.given.get("additionalProperties", True) is not False
            patterns: dict[str, Schema] = {NOT_ASCII: False} if is_open else {}
            for pattern, schema in self._named("patternProperties").items():
                key = translated(pattern, is_ascii=is_open)
                patterns[key] = {"allOf": [patterns[key], schema]} if key in patterns else schema
            self.out["patternProperties"] = patterns
        if "additionalProperties" in self.given:
            self.out["additionalProperties"] = self.whole.schema(self.given["additionalProperties"])
        if "required" in self.given:
            self.out["required"] = list(dict.fromkeys(texts(self.given, "required")))
        self._unevaluated_properties()
        self._property_names()
        names.check(self.out)
        for keyword in ("minProperties", "maxProperties"):
            if (bound := count(self.given, keyword)) is not None:
                self.out[keyword] = bound
        num_required = len(self.out.get("required", []))
        if self.out.get("minProperties", num_required + 1) <= num_required:
            del self.out["minProperties"]  # implied by required
        # A text may repeat the name of an unlisted property, which counts as one property.
        if self.out.get("minProperties", 0) > num_required + 1:
            raise unsupported(
                "minProperties",
                "is only supported up to one more than the number of required properties",
            )

    def _unevaluated_properties(self) -> None:
        unevaluated = self.given.get("unevaluatedProperties", True)
        if unevaluated in (True, {}) or "additionalProperties" in self.out:
            return
        known, patterns, is_open = self._evaluated(self.given, 0)
        if is_open:
            return
        properties = self.out.setdefault("properties", {})
        for name in known:
            properties.setdefault(name, True)
        if patterns:
            allowed = self.out.setdefault("patternProperties", {NOT_ASCII: False})
            for pattern in patterns:
                allowed.setdefault(translated(pattern, is_ascii=True), True)
        self.out["additionalProperties"] = self.whole.schema(unevaluated)

    def _evaluated(self, given: Json, depth: int) -> tuple[list[str], list[str], bool]:
        """Names and patterns of the properties evaluated by a schema and by those in its allOf and
        $ref, and whether it evaluates all properties."""
        if not isinstance(given, dict):
            return [], [], False
        other = [name for name in _APPLICATORS if name in given and name not in ("$ref", "allOf")]
        if other or depth > 20:
            raise unsupported(
                "unevaluatedProperties",
                f"is not supported together with '{(other or ['$ref'])[0]}'",
            )
        known = list(an_object(given, "properties")) if "properties" in given else []
        patterns = (
            list(an_object(given, "patternProperties")) if "patternProperties" in given else []
        )
        is_open = "additionalProperties" in given or (
            depth > 0 and "unevaluatedProperties" in given
        )
        parts = list(an_array(given, "allOf")) if "allOf" in given else []
        if "$ref" in given:
            parts.append(self.whole.target(given, "$ref"))
        for part in parts:
            more, more_patterns, opens = self._evaluated(part, depth + 1)
            known, patterns, is_open = known + more, patterns + more_patterns, is_open or opens
        return known, patterns, is_open

    def _property_names(self) -> None:
        given = self.given.get("propertyNames", True)
        for _ in range(8):  # aliases of aliases
            if not isinstance(given, dict) or set(names.constraints(given)) != {"$ref"}:
                break
            given = self.whole.target(given, "$ref")
        if given is True:
            return
        if given is False:
            self.out.pop("properties", None)
            self.out["additionalProperties"] = False
            self.out.pop("patternProperties", None)
            return
        if not isinstance(given, dict):
            raise malformed("propertyNames", "an object or a boolean", given)
        names.restrict(self.out, given)

    def _dependencies(self) -> None:
        if self.types is not None and "object" not in self.types:
            return
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            if keyword not in self.given:
                continue
            for name, needed in an_object(self.given, keyword).items():
                if isinstance(needed, list) and keyword != "dependentSchemas":
                    schema: Schema = {"required": texts({keyword: needed}, keyword)}
                elif keyword == "dependentRequired":
                    raise malformed(keyword, "an object of arrays of strings", self.given[keyword])
                else:
                    schema = self.whole.schema(needed)
                with_it = {"allOf": [{"required": [name]}, schema]}
                without_it = {"properties": {name: False}}
                self.also.append({"anyOf": [without_it, with_it]})

    def _in_place(self) -> None:
        for keyword in ("$ref", "$dynamicRef"):
            if keyword in self.given:
                found = self.whole.reference(self.given, keyword)
                if isinstance(found, dict) and "$ref" not in self.applied:
                    self.applied.update(found)
                else:
                    self.also.append(found)
        if "$recursiveRef" in self.given:
            raise unsupported("$recursiveRef", "is not supported")
        if "allOf" in self.given:
            self.also += self._each("allOf")
        if "anyOf" in self.given:
            self.applied["anyOf"] = self._each("anyOf")
        if "oneOf" in self.given:
            alternatives = self._each("oneOf")
            if not self.whole.are_exclusive(self.given["oneOf"]):
                raise unsupported("oneOf", "requires mutually exclusive schemas: use anyOf")
            if "anyOf" in self.applied:
                self.also.append({"anyOf": alternatives})
            else:
                self.applied["anyOf"] = alternatives
        if "anyOf" in self.applied:
            valid = [schema for schema in self.applied["anyOf"] if schema is not False]
            self.is_empty = self.is_empty or not valid
            self.applied["anyOf"] = valid
