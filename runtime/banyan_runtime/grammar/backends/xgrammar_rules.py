"""Grammars in xgrammar's words. It passes over in silence what it cannot enforce, so such grammars are refused here, before anything is
compiled. Needs neither xgrammar nor torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import msgspec

from banyan_runtime.grammar import structural
from banyan_runtime.grammar.backends.xgrammar_schemas import enforced
from banyan_runtime.grammar.errors import GrammarError
from banyan_runtime.grammar.parameters import parameters_of
from banyan_runtime.grammar.patterns import alternatives, may_hold_bracket
from banyan_runtime.grammar.pieces import Piece, Splitter
from banyan_runtime.grammar.strings import ANY, Either, Length, Listed, Pattern, Rule, value_of
from banyan_runtime.grammar.structural import Node, Tag
from banyan_runtime.wire import Grammar

_MARKER: Final = "\x01"  # what every token beside the vocabulary proper begins with (`xgrammar.py`)
_QWEN: Final = ("<parameter=", ">\n")

Form = dict[str, Any]


def check(grammar: Grammar) -> None:
    """Raises GrammarError for one that could not be enforced."""
    match grammar.kind:
        case "json_schema":
            enforced(msgspec.json.decode(grammar.text))
        case "structural_tag":
            TagWriter(Splitter({}), json_form).write(structural.decode(grammar.text))


def json_form(schema: dict[str, Any]) -> Form:
    """JSON with any blanks."""
    return {"type": "json_schema", "json_schema": schema}


class TagWriter:
    """Writes structural tags in xgrammar's words. To xgrammar every token is text, so that free text would take in a marker too; here those
    tokens are no text (`xgrammar.py`), and a marker in a text is written as its token."""

    def __init__(self, splitter: Splitter, json: Callable[[dict[str, Any]], Form]) -> None:
        """`json`: how an instance of a schema is written."""
        self._splitter = splitter
        self._json = json

    def write(self, node: Node) -> Form:
        """Raises GrammarError for what xgrammar has no words for."""
        match node:
            case structural.Text(value):
                return self._text(value)
            case structural.Json(schema):
                return self._json(enforced(schema))
            case structural.Parameters():
                return self._parameters(node)
            case structural.Regex() | structural.Ebnf():
                written: Form = msgspec.to_builtins(node)
                return written
            case structural.AnyText(excludes):
                return self._free(excludes)
            case structural.Token(token):
                return {"type": "token", "token": self._splitter.ids.get(token, token) if isinstance(token, str) else token}
            case structural.Sequence(elements):
                return _sequence(map(self.write, elements))
            case structural.Or(elements):
                return _either(map(self.write, elements))
            case structural.Optional(content) | structural.Star(content) | structural.Plus(content):
                return {"type": type(node).__struct_config__.tag, "content": self.write(content)}
            case Tag():
                return self._tag(node, node.begin)
            case structural.TriggeredTags():
                return self._triggered(node)
            case structural.TagsWithSeparator():
                return self._separated(node)
        raise AssertionError(node)

    def _pieces(self, text: str) -> list[Form]:
        return list(map(_piece, self._splitter.split(text)))

    def _text(self, text: str) -> Form:
        return _sequence(self._pieces(text))

    def _free(self, excludes: Iterable[str]) -> Form:
        """Free text without these. Tokens of their own never occur in text."""
        pieces = {text: self._splitter.split(text) for text in excludes}
        return {"type": "any_text", "excludes": [_MARKER, *(text for text, split in pieces.items() if split == [text])]}

    def _ended(self, content: Form, end: str) -> Form:
        """`content`, up to the first place at which `end` follows."""
        pieces = self._splitter.split(end)
        if not pieces or isinstance(pieces[0], int):
            return _sequence([content, *map(_piece, pieces)])
        return _sequence([{"type": "tag", "begin": "", "content": content, "end": pieces[0]}, *map(_piece, pieces[1:])])

    def _tag(self, tag: Tag, begin: str) -> Form:
        """A tag of which only `begin` is still to come before its content."""
        content = self.write(tag.content)
        return _sequence([*self._pieces(begin), _either(self._ended(content, end) for end in tag.ends)])

    def _triggered(self, node: structural.TriggeredTags) -> Form:
        groups: dict[str, list[Tag]] = {}
        for tag in node.tags:
            trigger = next(trigger for trigger in node.triggers if tag.begin.startswith(trigger))
            groups.setdefault(self._splitter.whole(trigger, tag.begin), []).append(tag)
        called = []
        for trigger, tags in groups.items():
            before = self._free([*(other for other in groups if other != trigger), *node.excludes])
            rest = _either(self._tag(tag, tag.begin[len(trigger) :]) for tag in tags)
            called.append(_sequence([self._ended(before, trigger), rest]))
        later, tail = _either(called), self._free([*groups, *node.excludes])
        first = [_either(self._tag(tag, tag.begin) for tag in node.tags)] if node.at_least_one else []
        if node.stop_after_first:
            return first[0] if first else _either([later, tail])
        return _sequence([*first, {"type": "star", "content": later}, tail])

    def _separated(self, node: structural.TagsWithSeparator) -> Form:
        tag = _either(self._tag(tag, tag.begin) for tag in node.tags)
        more = [] if node.stop_after_first else [{"type": "star", "content": _sequence([*self._pieces(node.separator), tag])}]
        several = _sequence([tag, *more])
        return several if node.at_least_one else {"type": "optional", "content": several}

    def _parameters(self, node: structural.Parameters) -> Form:
        if node.separator:
            return self._separated_parameters(node)
        shape = parameters_of(node.json_schema)
        if shape.others is not None:
            key = _regex("[A-Za-z_][A-Za-z0-9_-]*")
            body = self._value(node, shape.others, f"{shape.path}/additionalProperties")
            return {"type": "star", "content": _sequence([*self._pieces(node.before), key, *self._pieces(node.between), body])}
        told: list[Form] = []
        for name, value in shape.properties.items():
            body = self._value(node, value, shape.place(name))
            part = _sequence([*self._pieces(node.before + name + node.between), body])
            told.append(part if name in shape.required else {"type": "optional", "content": part})
        return _sequence(told)

    def _separated_parameters(self, node: structural.Parameters) -> Form:
        """What a client writes with a style that xgrammar has itself."""
        around = (node.before, node.between, node.after)
        if around[:2] != _QWEN or any(self._splitter.split(text) != [text] for text in around):
            raise GrammarError("parameters in this form are not supported by xgrammar.")
        return {"type": "json_schema", "style": "qwen_xml", "json_schema": enforced(node.json_schema), "excludes": [_MARKER]}

    def _value(self, node: structural.Parameters, schema: Mapping[str, Any], path: str) -> Form:
        """A parameter's value, and what ends it: strings bare, as who reads calls takes them, and others as JSON."""
        value = value_of(schema, node.json_schema, path, (*node.excludes, node.after))
        if not isinstance(value.rule, Listed) and set(value.kinds) - {"null"}:
            raise GrammarError(f"strings that must fit a rule, beside other values, at {path[:200]} are not supported by xgrammar.")
        told = [] if value.json is None else [_sequence([self._json(enforced(value.json, path)), *self._pieces(node.after)])]
        return _either([*told, *self._ruled(node, value.rule, path)])

    def _ruled(self, node: structural.Parameters, rule: Rule, path: str) -> list[Form]:
        """The texts that a rule admits, with what ends them. Those of a length have no bracket, nor may those of a pattern: xgrammar cannot
        keep markers out of them."""
        end = self._pieces(node.after)
        match rule:
            case Listed(texts):
                return [self._text(text + node.after) for text in texts]
            case Length(least, most):
                return [_sequence([_regex(f"[^<]{{{least},{'' if most is None else most}}}"), *end])]
            case Pattern(pattern):
                found = alternatives(pattern)
                if not all(one.begins and one.ends for one in found):
                    raise GrammarError(
                        f"'pattern' at {path[:200]} must begin with ^ and end with $ for xgrammar, which matches whole texts."
                    )
                if may_hold_bracket(pattern):
                    raise GrammarError(
                        f"'pattern' at {path[:200]} may admit '<', which is not supported by xgrammar where parameters are text."
                    )
                return [_sequence([_regex(one.regex), *end]) for one in found]
            case Either(rules):
                return [form for one in rules for form in self._ruled(node, one, path)]
        if rule == ANY:
            return [self._ended(self._free(node.excludes), node.after)]
        raise GrammarError(f"several rules for one string, at {path[:200]}, are not supported by xgrammar.")


def _regex(pattern: str) -> Form:
    return {"type": "regex", "pattern": pattern}


def _piece(piece: Piece) -> Form:
    return {"type": "token", "token": piece} if isinstance(piece, int) else {"type": "const_string", "value": piece}


def _sequence(elements: Iterable[Form]) -> Form:
    listed = list(elements)
    if not listed:
        return {"type": "const_string", "value": ""}
    return listed[0] if len(listed) == 1 else {"type": "sequence", "elements": listed}


def _either(elements: Iterable[Form]) -> Form:
    listed = list(elements)
    return listed[0] if len(listed) == 1 else {"type": "or", "elements": listed}
