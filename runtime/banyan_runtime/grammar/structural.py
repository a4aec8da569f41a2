"""Structural tags: outputs of which some parts are free text and others begin, end and look as was said.

The notation is xgrammar's, which SGLang and vLLM take too: an object with a `format`, or the older one with `structures` and
`triggers`. The text of a `wire.Grammar` of this kind is the `format` alone, checked, its schemas prepared.
"""

from __future__ import annotations

import re
from typing import Any, Final, Literal

import msgspec

from banyan_runtime.grammar import schema
from banyan_runtime.grammar.errors import GrammarError
from banyan_runtime.grammar.limits import MAX_REGEX_BYTES, MAX_TAG_BYTES, check_ebnf, check_text
from banyan_runtime.grammar.parameters import Shape, parameters_of
from banyan_runtime.wire import Grammar


class _Node(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="type"):
    pass


class Text(_Node, frozen=True, tag="const_string"):
    """Exactly this."""

    value: str


class Json(_Node, frozen=True, tag="json_schema"):
    """An instance of a schema."""

    json_schema: dict[str, Any]
    style: Literal["json", "qwen_xml", "glm_xml"] = "json"


class QwenXml(_Node, frozen=True, tag="qwen_xml_parameter"):
    """Another word for `Json` in that style."""

    json_schema: dict[str, Any]


class Parameters(_Node, frozen=True, tag="parameters"):
    """The properties of an object, each for itself and in the schema's order: `before` its name, `between`, its value, `after`,
    and `separator` between two of them. Text is written as it is, and ends where `after` begins; other values are JSON. `excludes`: what
    no text has in it, since who reads it would take it for something else."""

    json_schema: dict[str, Any]
    before: str
    between: str
    after: str
    separator: str = ""
    excludes: tuple[str, ...] = ()


class Regex(_Node, frozen=True, tag="regex"):
    pattern: str


class Ebnf(_Node, frozen=True, tag="grammar"):
    grammar: str


class AnyText(_Node, frozen=True, tag="any_text"):
    """Free text without any of `excludes`."""

    excludes: tuple[str, ...] = ()


class Token(_Node, frozen=True, tag="token"):
    """One token, by id or by the text it is written as."""

    token: int | str


class Sequence(_Node, frozen=True, tag="sequence"):
    elements: tuple[Node, ...]


class Or(_Node, frozen=True, tag="or"):
    elements: tuple[Node, ...]


class Optional(_Node, frozen=True, tag="optional"):
    content: Node


class Star(_Node, frozen=True, tag="star"):
    content: Node


class Plus(_Node, frozen=True, tag="plus"):
    content: Node


class Tag(_Node, frozen=True, tag="tag"):
    begin: str
    content: Node
    end: str | tuple[str, ...]

    @property
    def ends(self) -> tuple[str, ...]:
        return (self.end,) if isinstance(self.end, str) else self.end


class TriggeredTags(_Node, frozen=True, tag="triggered_tags"):
    """Free text, in which each trigger begins one of the tags that begin so. `at_least_one`: the first one comes at once."""

    triggers: tuple[str, ...]
    tags: tuple[Tag, ...]
    at_least_one: bool = False
    stop_after_first: bool = False
    excludes: tuple[str, ...] = ()


class TagsWithSeparator(_Node, frozen=True, tag="tags_with_separator"):
    """Tags and nothing else but what stands between two of them."""

    tags: tuple[Tag, ...]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


Node = (
    Text
    | Json
    | QwenXml
    | Parameters
    | Regex
    | Ebnf
    | AnyText
    | Token
    | Sequence
    | Or
    | Optional
    | Star
    | Plus
    | Tag
    | TriggeredTags
    | TagsWithSeparator
)

_MAX_NAME: Final = 256  # characters of a parameter's; who reads calls takes no more for one
_NAME: Final = re.compile(r"(?!\s)[^<>\r\n]+(?<!\s)")
_decoder: Final = msgspec.json.Decoder(Node)
_encoder: Final = msgspec.json.Encoder()


def decode(text: str) -> Node:
    """The inverse of `write`."""
    node: Node = _decoder.decode(text)
    return node


def node_of(grammar: Grammar) -> Node:
    """A grammar of any kind, as part of a structural tag."""
    match grammar.kind:
        case "json_object":
            return Json({"type": "object"})
        case "json_schema":
            return Json(msgspec.json.decode(grammar.text))
        case "regex":
            return Regex(grammar.text)
        case "choice":
            return Or(tuple(map(Text, msgspec.json.decode(grammar.text, type=list[str]))))
        case "ebnf":
            return Ebnf(grammar.text)
    assert grammar.kind == "structural_tag", grammar.kind
    return decode(grammar.text)


def read_structural(value: object) -> str:
    """The text of a grammar of kind `structural_tag`, from JSON or its text. Raises GrammarError."""
    if isinstance(value, str):
        check_text(value, "the structural tag", MAX_TAG_BYTES)
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError) as error:
            raise GrammarError(f"it is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise GrammarError("a structural tag is a JSON object.")
    if value.get("format") is not None:
        form = value["format"]
    elif value.get("structures") is not None:
        form = _of_structures(value)
    else:
        raise GrammarError("a structural tag has 'format', or 'structures' and 'triggers'.")
    schema.check_nesting(form, "the structural tag")
    try:
        node = msgspec.convert(_tagged(form), Node)
    except msgspec.ValidationError as error:
        raise GrammarError(str(error)) from None
    return write(node)


def write(node: Node) -> str:
    """The text of a grammar of kind `structural_tag`. Raises GrammarError for parts that are wrong."""
    try:
        text = _encoder.encode(_prepared(node)).decode()
    except UnicodeEncodeError:
        raise GrammarError("the structural tag has half of a surrogate pair, which no output can have.") from None
    except ValueError:
        raise GrammarError("the structural tag has a number of more than 4300 digits.") from None
    check_text(text, "the structural tag", MAX_TAG_BYTES)
    if "\\u0000" in text and schema.has_nul(msgspec.json.decode(text)):
        raise GrammarError("the structural tag has a NUL character, which no output can have.")
    return text


def _of_structures(value: dict[str, Any]) -> dict[str, Any]:
    """The older notation in the newer one."""
    structures = value["structures"]
    if not isinstance(structures, list) or not all(isinstance(item, dict) for item in structures):
        raise GrammarError("'structures' is a list of objects.")
    tags = [
        {
            "begin": item.get("begin"),
            "content": {"type": "json_schema", "json_schema": item.get("schema") or {}},
            "end": item.get("end", ""),
        }
        for item in structures
    ]
    return {"type": "triggered_tags", "triggers": value.get("triggers"), "tags": tags}


def _tagged(value: Any) -> Any:
    """`value`, where the tags in lists, which need not say what they are, do."""
    if isinstance(value, dict):
        result = {name: item if name == "json_schema" else _tagged(item) for name, item in value.items()}
        tags = result.get("tags")
        if isinstance(tags, list):
            result["tags"] = [{"type": "tag", **tag} if isinstance(tag, dict) else tag for tag in tags]
        return result
    return [_tagged(item) for item in value] if isinstance(value, list) else value


_XML: Final = {
    "qwen_xml": ("<parameter=", ">\n", "\n</parameter>", "\n"),
    "glm_xml": ("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>", "\n"),
}


def _schema(value: dict[str, Any]) -> dict[str, Any]:
    checked: dict[str, Any] = msgspec.json.decode(schema.prepare(value))
    return checked


def _prepared(node: Node) -> Node:
    """`node`, its parts checked and its schemas prepared. Raises GrammarError."""
    replace = msgspec.structs.replace
    match node:
        case Json(json_schema, style):
            checked = _schema(json_schema)
            return Json(checked) if style == "json" else Parameters(checked, *_XML[style])
        case QwenXml(json_schema):
            return Parameters(_schema(json_schema), *_XML["qwen_xml"])
        case Parameters(json_schema):
            if not node.after:
                raise GrammarError("'after' of parameters must not be empty: nothing else ends a value.")
            checked = _schema(json_schema)
            _check_names(parameters_of(checked))
            return replace(node, json_schema=checked)
        case Regex(pattern):
            check_text(pattern, "a regex", MAX_REGEX_BYTES)
            return node
        case Ebnf(grammar):
            check_ebnf(grammar, "a grammar")
            return node
        case Sequence(elements) | Or(elements):
            if not elements:
                raise GrammarError(f"'elements' of a {type(node).__name__.lower()} must not be empty.")
            return replace(node, elements=tuple(map(_prepared, elements)))
        case Optional(content) | Star(content) | Plus(content):
            return replace(node, content=_prepared(content))
        case Tag(_, content):
            if not node.ends:
                raise GrammarError("'end' of a tag must not be empty.")
            return replace(node, content=_prepared(content))
        case TriggeredTags(triggers, tags):
            _check_triggers(triggers, tags)
            return replace(node, tags=tuple(map(_prepared, tags)))
        case TagsWithSeparator(tags):
            if not tags:
                raise GrammarError("'tags' must not be empty.")
            return replace(node, tags=tuple(map(_prepared, tags)))
    return node


def _check_names(shape: Shape) -> None:
    """Names of parameters stand in tags."""
    for name in shape.properties:
        if len(name) > _MAX_NAME or _NAME.fullmatch(name) is None:
            raise GrammarError(
                f"the name {name[:60]!r} cannot stand in a tag, as this model writes parameters: it must not be empty, begin or end with "
                f"a blank, have <, > or a line break in it, or more than {_MAX_NAME} characters."
            )


def _check_triggers(triggers: tuple[str, ...], tags: tuple[Tag, ...]) -> None:
    if not triggers or not all(triggers):
        raise GrammarError("'triggers' must not be empty, nor have an empty one.")
    if not tags:
        raise GrammarError("'tags' must not be empty.")
    for tag in tags:
        if not any(tag.begin.startswith(trigger) for trigger in triggers):
            raise GrammarError(f"no trigger is the beginning of the tag {tag.begin[:100]!r}.")
    for trigger in triggers:
        if not any(tag.begin.startswith(trigger) for tag in tags):
            raise GrammarError(f"no tag begins with the trigger {trigger[:100]!r}.")
        if any(other is not trigger and other.startswith(trigger) for other in triggers):
            raise GrammarError(f"another trigger begins with the trigger {trigger[:100]!r}.")
