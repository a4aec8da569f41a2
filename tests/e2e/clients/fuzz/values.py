"""Values for fields: what a schema asks for, what looks like it, and what nobody asked for."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from typing import Any, Final

Schema = Mapping[str, Any]
Json = Any


class Raw(str):
    """Text that stands in a body as it is, since no JSON writer would write it."""


NUMBERS: Final[tuple[Json, ...]] = (
    0,
    1,
    -1,
    2,
    3,
    0.5,
    1.5,
    -0.0,
    20,
    21,
    128,
    129,
    2**31,
    -(2**31),
    2**53 + 1,
    -(2**63),
    2**64,
    10**30,
    1e308,
    5e-324,
)
TEXTS: Final = (
    "",
    " ",
    "a",
    "Hello",
    "tiny",
    "\x00",
    "\u200d\u202e",
    "👩‍👩‍👧‍👦 e\u0301",
    "<|im_start|>system",
    "<think>",
    "</think></tool_call>",
    "{{ 7 * 7 }}{% for x in range(10**9) %}",
    "../../etc/passwd",
    "http://127.0.0.1/",
    "(a+)+$",
    "[",
    "(?P<x>a)(?P=x)",
    "\\p{Greek}{1,100000}",
    "root ::= root",
    'start: "a" start | "b"',
    "auto",
    "required",
    "none",
    "base64",
    "json_schema",
    "x" * 3000,
    "ل" * 700,
)
LITERALS: Final = (
    Raw("NaN"),
    Raw("-Infinity"),
    Raw("1e999"),
    Raw('"\\ud800"'),
    Raw("9" * 5000),
    Raw("1" + "0" * 400 + ".5"),
    Raw("0.1e-99999"),
)
KEYS: Final = ("", "__proto__", "type", "$ref", "chat_template", "colour", "a" * 500, "é", "0", "-1", "99999999999999999999", "\x00")
FORMATS: Final[tuple[Json, ...]] = (
    {"type": "json_object"},
    {"type": "text"},
    {"type": "json_schema"},
    {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}},
    {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": {"$ref": "#"}}},
    {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#/$defs/nowhere"}}},
    {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "string", "pattern": "("}}},
    {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": []}}},
    {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "array", "minItems": 10**9}}},
    {"type": "json_schema", "json_schema": {"name": "a", "schema": {"allOf": [{"type": "string"}, {"type": "integer"}]}}},
    {"type": "structural_tag", "structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a"]},
)
TOOLS: Final[tuple[Json, ...]] = (
    [{"type": "function", "function": {"name": "now"}}],
    [
        {
            "type": "function",
            "function": {"name": "get", "strict": True, "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}},
        }
    ],
    [{"type": "function", "function": {"name": "get", "parameters": {"type": "town"}}}],
    [{"type": "function", "function": {"name": "a b"}}],
    [{"type": "function"}],
    [{"type": "retrieval"}],
    [{"name": "now", "input_schema": {"type": "object"}}],
    [{"type": "function", "name": "now", "parameters": {}}],
)
CONVERSATIONS: Final[tuple[Json, ...]] = (
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be short."}, {"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": []}],
    [{"role": "tool", "tool_call_id": "x", "content": "1"}],
    [{"role": "assistant", "tool_calls": [{"id": "x", "type": "function", "function": {"name": "now", "arguments": "{"}}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}]}],
    [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": "1"}]}],
    [{"role": "king", "content": "a"}],
    [{"role": "user"}],
)
LIKELY: Final[Mapping[str, tuple[Json, ...]]] = {  # the first of each is what a client would send
    "messages": CONVERSATIONS,
    "tools": TOOLS,
    "response_format": FORMATS,
    "tool_choice": (
        "auto",
        "none",
        "required",
        {"type": "function", "function": {"name": "now"}},
        {"type": "any"},
        {"type": "tool", "name": "now"},
    ),
    "prompt": ("One, two,", ["a", "b"], [5, 6, 7], [[5, 6], [7]], [10**6], [], [[]], ["a", [5]], "word " * 3000),
    "input": ("Hello", ["a", "b"], [5, 6], [[5], [6]], [{"role": "user", "content": "Hello"}], [{"type": "function_call_output"}]),
    "text": ("Hello", ["a", "b"], {"format": {"type": "json_object"}}),
    "input_ids": ([5, 6], [[5], [6, 7]], [-1], [10**9]),
    "query": ("cats",),
    "documents": (["dogs", "cats"], [{"text": "dogs"}, "cats"], [], [None]),
    "text_1": ("cats", ["cats"], [5, 6]),
    "text_2": (["dogs", "cats"], "cats", []),
    "tokens": ([5, 6], [-1], [10**9], [[5]]),
    "logit_bias": ({"5": 100}, {"5": -100}, {"x": 1}, {"99999999": 1}, {"5": 101}),
    "stop": ("\n", ["a", "b"], ["a"] * 33, "", [""]),
    "stop_token_ids": ([2], [-1], [10**9]),
    "regex": ("[ab]{1,4}", "(", "(a|b)*c", "a{1,1000000}"),
    "structured_outputs": (
        {"regex": "[ab]+"},
        {"json": {"type": "object"}},
        {"choice": ["a", "b"]},
        {"choice": []},
        {"regex": "a", "choice": ["a"]},
    ),
    "reasoning_effort": ("low", "none", "highest"),
    "model": ("tiny", "default", "nobody", "tiny:adapter"),
    "encoding_format": ("float", "base64", "hex"),
    "purpose": ("batch", "fine-tune"),
    "endpoint": ("/v1/chat/completions", "/v1/nowhere"),
    "completion_window": ("24h", "1s"),
}

ESSENTIAL: Final = (("messages", "prompt", "input"), ("text",), ("tokens",), ("query",), ("text_1",))
"""Fields, of the first group that a schema has, without which there is nothing to do, though many schemas require none of them."""
PARTNERS: Final = {"query": "documents", "text_1": "text_2"}


def deep(depth: int, dictionaries: bool) -> Raw:
    return Raw('{"a":' * depth + "1" + "}" * depth) if dictionaries else Raw("[" * depth + "]" * depth)


class Values:
    """Draws of values by the schemas of one document."""

    def __init__(self, random: random.Random, components: Mapping[str, Schema]) -> None:
        self.random = random
        self.components = components

    def fitting(self, schema: Schema, name: str = "", depth: int = 0) -> Json:
        """Mostly what `schema` asks for; `name` is the field's."""
        draw = self.random
        if name in LIKELY and draw.random() < 0.7:
            return LIKELY[name][0] if draw.random() < 0.6 else draw.choice(LIKELY[name])
        if "$ref" in schema:
            return self.fitting(self.components[schema["$ref"].rpartition("/")[2]], name, depth)
        for several in ("anyOf", "oneOf", "allOf"):
            if several in schema:
                return self.fitting(draw.choice(schema[several]), name, depth)
        if "enum" in schema:
            return draw.choice(schema["enum"])
        if "const" in schema:
            return schema["const"]
        kind = schema.get("type")
        if isinstance(kind, list):
            kind = draw.choice(kind)
        make = self._makers.get(kind)
        return make(self, schema, depth) if make else self.odd(depth)

    def _object(self, schema: Schema, depth: int) -> Json:
        fields: Mapping[str, Schema] = schema.get("properties", {})
        required = set(schema.get("required", ()))
        share = self.random.choice((0.02, 0.05, 0.15, 0.4)) if depth == 0 else 0.4
        made = {name: self.fitting(of, name, depth + 1) for name, of in fields.items() if name in required or self.random.random() < share}
        if depth == 0:
            for group in ESSENTIAL:
                there = [name for name in group if name in fields]
                if there and not made.keys() & set(there) and self.random.random() < 0.85:
                    name = self.random.choice(there)
                    for named in (name, PARTNERS.get(name)):
                        if named in fields:
                            made[named] = self.fitting(fields[named], named, depth + 1)
                if there:
                    break
        more = schema.get("additionalProperties")
        if isinstance(more, Mapping) and depth < 6:
            made.update({self.random.choice(KEYS): self.fitting(more, "", depth + 1) for _ in range(self.random.randint(0, 2))})
        return made

    def _array(self, schema: Schema, depth: int) -> Json:
        length = self.random.choice((0, 1, 1, 2, 3)) if depth < 6 else 0
        return [self.fitting(schema.get("items", {}), "", depth + 1) for _ in range(length)]

    _makers: Final[Mapping[str, Callable[[Values, Schema, int], Json]]] = {
        "object": _object,
        "array": _array,
        "string": lambda self, schema, depth: self.random.choice(TEXTS),
        "integer": lambda self, schema, depth: (
            self.random.choice(NUMBERS[:5]) if self.random.random() < 0.7 else self.random.choice(NUMBERS)
        ),
        "number": lambda self, schema, depth: (
            self.random.choice(NUMBERS[:8]) if self.random.random() < 0.7 else self.random.choice(NUMBERS)
        ),
        "boolean": lambda self, schema, depth: self.random.random() < 0.5,
        "null": lambda self, schema, depth: None,
    }

    def odd(self, depth: int = 0) -> Json:
        """A value of any kind at all."""
        draw = self.random
        kind = draw.randrange(9 if depth < 4 else 5)
        if kind == 0:
            return draw.choice((None, True, False))
        if kind == 1:
            return draw.choice(NUMBERS)
        if kind == 2:
            return draw.choice(LITERALS)
        if kind in (3, 4):
            return draw.choice(TEXTS)
        if kind == 5:
            return deep(draw.choice((3, 40, 300, 5000)), draw.random() < 0.5)
        if kind == 6:
            return [self.odd(depth + 1)] * draw.choice((0, 1, 2, 40, 3000 if depth == 0 else 3))
        if kind == 7:
            return {draw.choice(KEYS): self.odd(depth + 1) for _ in range(draw.randint(0, 3))}
        return draw.choice(draw.choice(tuple(LIKELY.values())))


def write(value: Json) -> str:
    """As JSON, but for what is Raw. Lone surrogates are written as escapes."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{json.dumps(key)}:{write(of)}" for key, of in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(write, value)) + "]"
    return json.dumps(value)
