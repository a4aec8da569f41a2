"""Structural tags as Lark, in the dialect of llguidance: `<[7]>` is token 7, `%json` a schema, `[lazy]` a terminal that ends as soon
as it can."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from itertools import count, pairwise
from typing import Any, Final

from banyan_runtime.grammar import structural
from banyan_runtime.grammar.errors import GrammarError
from banyan_runtime.grammar.parameters import Bare, parameters_of, values_of
from banyan_runtime.grammar.patterns import Alternative, alternatives, without
from banyan_runtime.grammar.pieces import Piece, Splitter
from banyan_runtime.grammar.structural import Node, Tag

_ANY: Final = r"/(.|\n)*/"
_MANY: Final = 64  # texts
EMPTY: Final = '""'


class LarkWriter:
    """Writes one structural tag. `json_options`: how JSON is written, as `x-guidance`; `regex`: a regex between slashes;
    `ebnf`: a grammar as Lark."""

    def __init__(
        self, splitter: Splitter, json_options: Mapping[str, Any], regex: Callable[[str], str], ebnf: Callable[[str], str]
    ) -> None:
        self._splitter = splitter
        self._json_options = dict(json_options)
        self._regex = regex
        self._ebnf = ebnf
        self._numbers = count()
        self._lines: list[str] = []
        self._grammars: dict[str, str] = {}

    def write(self, node: Node) -> tuple[str, dict[str, str]]:
        """The grammar, and those that it refers to by name. Raises GrammarError."""
        body = self._node(node, "")
        return "\n".join([f"start: {body}", *self._lines, ""]), self._grammars

    def _node(self, node: Node, end: str) -> str:
        """An expression for the node and the text behind it. That is part of it, since free text goes up to where it begins."""
        match node:
            case structural.AnyText(excludes):
                return self._free(excludes, end)
            case structural.Or(elements):
                if (texts := self._told_apart(elements)) is not None:
                    return f"{self._terminal(' | '.join(map(_quoted, texts)))} {self.literal(end)}".strip()
                return "(" + " | ".join(self._node(element, end) for element in elements) + ")"
            case structural.Sequence(elements):
                return " ".join([*(self._node(element, "") for element in elements[:-1]), self._node(elements[-1], end)])
        return f"{self._closed(node)} {self.literal(end)}".strip() or EMPTY

    def _closed(self, node: Node) -> str:
        """An expression for a node that knows itself where it ends."""
        match node:
            case structural.Text(value):
                return self.literal(value)
            case structural.Json(schema):
                return self._json(schema)
            case structural.Parameters():
                return self._parameters(node)
            case structural.Regex(pattern):
                return f"/{self._regex(pattern)}/"
            case structural.Ebnf(grammar):
                name = f"grammar_{next(self._numbers)}"
                self._grammars[name] = self._ebnf(grammar)
                return f"@{name}"
            case structural.Token(token):
                return self._token(token)
            case structural.Optional(content):
                return self._rule(self._node(content, "")) + "?"
            case structural.Star(content):
                return self._rule(self._node(content, "")) + "*"
            case structural.Plus(content):
                return self._rule(self._node(content, "")) + "+"
            case Tag():
                return self._tag(node, node.begin)
            case structural.TriggeredTags():
                return self._triggered(node)
            case structural.TagsWithSeparator():
                return self._separated(node)
        raise AssertionError(node)

    def _told_apart(self, elements: tuple[Node, ...]) -> list[str] | None:
        """Texts of which none begins with another one, so that a terminal, which takes the longest, can stand for all of them: parsers are
        slow with thousands of alternatives."""
        texts = sorted({node.value for node in elements if isinstance(node, structural.Text)})
        if len(texts) < _MANY or len(texts) < len(elements) or any(later.startswith(one) for one, later in pairwise(texts)):
            return None
        return texts if all(self._splitter.split(text) == [text] for text in texts) else None

    def literal(self, text: str) -> str:
        return " ".join(map(_piece, self._splitter.split(text)))

    def _rule(self, body: str, form: str = "") -> str:
        name = f"r{next(self._numbers)}"
        self._lines.append(f"{name}{form}: {body}")
        return name

    def _terminal(self, body: str) -> str:
        name = f"T{next(self._numbers)}"
        self._lines.append(f"{name}: {body}")
        return name

    def _json(self, schema: dict[str, Any]) -> str:
        return "%json " + json.dumps({**schema, "x-guidance": self._json_options})

    def _token(self, token: int | str) -> str:
        if isinstance(token, int):
            if token < 0:
                raise GrammarError(f"there is no token {token}.")
            return f"<[{token}]>"
        if token not in self._splitter.ids:
            raise GrammarError(f"this model has no token {token[:100]!r}.")
        return f"<[{self._splitter.ids[token]}]>"

    def _without(self, excluded: Iterable[str]) -> str:
        """A terminal: free text in which none of these occurs. Tokens of their own never occur in text."""
        plain = [text for text in excluded if self._is_text(text)]
        return self._terminal(" & ".join([_ANY, *(f"~({_ANY} {_quoted(text)} {_ANY})" for text in plain)]))

    def _is_text(self, text: str) -> bool:
        pieces = self._splitter.split(text)
        return bool(pieces) and all(isinstance(piece, str) for piece in pieces)

    def _free(self, excludes: tuple[str, ...], end: str) -> str:
        """Free text up to the first place at which `end` follows."""
        return self._up_to(self._without(excludes), end)

    def _up_to(self, text: str, end: str) -> str:
        """A terminal of text, up to the first place at which `end` follows."""
        pieces = self._splitter.split(end)
        if not pieces or isinstance(pieces[0], int):
            return f"{text} {self.literal(end)}".strip()
        head = self._rule(f"{text} {_quoted(pieces[0])}", "[lazy]")
        return " ".join([head, *map(_piece, pieces[1:])])

    def _tag(self, tag: Tag, begin: str) -> str:
        """A tag of which only `begin` is still to come before its content."""
        ends = " | ".join(self._node(tag.content, end) for end in tag.ends)
        return f"{self.literal(begin)} {f'({ends})' if len(tag.ends) > 1 else ends}".strip()

    def _triggered(self, node: structural.TriggeredTags) -> str:
        groups: dict[str, list[Tag]] = {}
        for tag in node.tags:
            trigger = next(trigger for trigger in node.triggers if tag.begin.startswith(trigger))
            groups.setdefault(self._splitter.whole(trigger, tag.begin), []).append(tag)
        tail = self._without([*groups, *node.excludes])
        called: list[str] = []
        for trigger, tags in groups.items():
            rest = self._rule(" | ".join(self._tag(tag, tag.begin[len(trigger) :]) for tag in tags))
            pieces = self._splitter.split(trigger)
            if isinstance(pieces[0], int):
                called.append(self._rule(" ".join([tail, *map(_piece, pieces), rest])))
            elif len(pieces) == 1:
                head = self._rule(f"{self._without(node.excludes)} {_quoted(trigger)}", "[lazy]")
                called.append(self._rule(f"{head} {rest}"))
            else:
                raise GrammarError(f"the trigger {trigger[:100]!r} must begin with its token.")
        later = self._rule(" | ".join(called))
        first = self._rule(" | ".join(self._tag(tag, tag.begin) for tag in node.tags))
        if node.stop_after_first:
            return first if node.at_least_one else f"({later} | {tail})"
        return f"{first} {later}* {tail}" if node.at_least_one else f"{later}* {tail}"

    def _separated(self, node: structural.TagsWithSeparator) -> str:
        tag = self._rule(" | ".join(self._tag(tag, tag.begin) for tag in node.tags))
        several = tag if node.stop_after_first else f"{tag} ({self.literal(node.separator)} {tag})*"
        return several if node.at_least_one else f"({several})?"

    def _parameters(self, node: structural.Parameters) -> str:
        shape = parameters_of(node.json_schema)
        if shape.others is not None:
            return self._any_parameters(node, shape.others, "#/additionalProperties")
        # Behind the first parameter each has the separator before it: `rest` is what may follow from there on.
        rest, first = "", EMPTY
        for name, value in reversed(list(shape.properties.items())):
            body = self._value(node, value, f"#/properties/{name}")
            part = self._rule(f"{self.literal(node.before + name + node.between)} {body}")
            optional = name not in shape.required
            begins = f"{part} {rest}".strip()
            first = f"({begins} | {first})" if optional else begins
            later = self._rule(f"{self.literal(node.separator)} {part}".strip())
            rest = self._rule(f"{later}{'?' if optional else ''} {rest}".strip())
            first = self._rule(first)
        return first

    def _any_parameters(self, node: structural.Parameters, schema: Mapping[str, Any], path: str) -> str:
        """Whatever names, and values of the schema."""
        name = self._terminal("/[A-Za-z_][A-Za-z0-9_-]*/")
        part = self._rule(f"{self.literal(node.before)} {name} {self.literal(node.between)} {self._value(node, schema, path)}")
        return f"({part} ({self.literal(node.separator)} {part})*)?"

    def _value(self, node: structural.Parameters, schema: Mapping[str, Any], path: str) -> str:
        """A parameter's value and the text behind it."""
        told = []
        for value in values_of(schema, node.json_schema, path):
            if isinstance(value, dict):
                told.append(f"{self._json(value)} {self.literal(node.after)}")
            elif isinstance(value, Bare):
                told.append(self._bare(node, value))
            elif marker := next((marker for marker in (*node.excludes, node.after) if marker in value), ""):
                what = f"{value[:60]!r} at {path[:200]}"
                raise GrammarError(f"{what} has {marker!r} in it, with which this model ends a parameter; leave it out.")
            else:
                told.append(self.literal(value + node.after))
        return told[0] if len(told) == 1 else "(" + " | ".join(told) + ")"

    def _bare(self, node: structural.Parameters, bare: Bare) -> str:
        """Such strings, up to what ends a value."""
        rules = [f"/{self._regex(without(node.excludes))}/" if node.excludes else _ANY]
        if bare.pattern:
            rules.append(self._terminal(" | ".join(map(self._found, alternatives(bare.pattern)))))
        if bare.least or bare.most is not None:
            rules.append(self._terminal(f"/(.|\\n){{{bare.least},{'' if bare.most is None else bare.most}}}/"))
        return self._up_to(self._terminal(" & ".join(rules)), node.after)

    def _found(self, alternative: Alternative) -> str:
        """Texts in which its regex is found."""
        regex = f"/{self._regex(alternative.regex)}/" if alternative.regex else EMPTY
        return f"({'' if alternative.begins else _ANY} {regex} {'' if alternative.ends else _ANY})"


def _piece(piece: Piece) -> str:
    return f"<[{piece}]>" if isinstance(piece, int) else _quoted(piece)


def _quoted(text: str) -> str:
    return json.dumps(text)
