"""Calls as Python writes them: [f(a=1), g()] as the whole output (Llama 4), or one on each line between <function_calls> and
</function_calls> (Olmo 3)."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from banyan_runtime.front.chat.reader import Malformed, Markers, Reader, Wait
from banyan_runtime.front.chat.tools.events import CallSink
from banyan_runtime.front.chat.tools.format import ToolFormat
from banyan_runtime.front.chat.tools.json_scan import encoded
from banyan_runtime.front.chat.tools.parser import Schemas

LIMIT: Final = 65_536
"""Characters of one call's arguments: they are held back and read as a whole."""

_MARKERS: Final = ("<|python_start|>", "<|python_end|>", "<function_calls>", "</function_calls>")
_OPEN: Final = Markers("<|python_start|>", "<function_calls>")
_CLOSE: Final = Markers("<|python_end|>")
_LIST: Final = Markers("[")
_BETWEEN: Final = Markers(",", "]")
_LINES_END: Final = Markers(",", "</function_calls>")
_NAME: Final = re.compile(r"[\w.-]*", re.ASCII)
_KEY: Final = re.compile(r"[\w.$@-]*")  # of a parameter: what tools declare, which need not be a name in Python
_PARENTHESIS: Final = Markers("(")
_EMPTY: Final = Markers(")")
_EQUALS: Final = Markers("=")
_STRUCTURE: Final = re.compile(r"""[()\[\]{}'",]""")
_STRING: Final = re.compile(r"""[\\'"]""")
_CLOSERS: Final = {"(": ")", "[": "]", "{": "}"}
_WORDS: Final[Mapping[str, object]] = MappingProxyType({"true": True, "false": False, "null": None, "none": None})


def _read(reader: Reader, sink: CallSink, tools: Schemas) -> Wait[None]:
    """Without a marker only the beginning of the output can be a list of calls."""
    reader.record()
    yield from reader.space()
    opened = yield from reader.accept(_OPEN)
    while True:
        try:
            yield from (_lines if opened == "<function_calls>" else _list)(reader, sink)
        except Malformed:
            sink.text(reader.release())
        opened = yield from reader.until(_OPEN, sink.text)
        reader.record(opened)


def _list(reader: Reader, sink: CallSink) -> Wait[None]:
    yield from reader.space()
    yield from reader.expect(_LIST)
    begun = False
    while True:
        yield from reader.space()
        end = (yield from reader.accept(_BETWEEN)) if begun else None
        if end is None:
            give = yield from _call(reader)
            yield from reader.space()
            end = yield from reader.accept(_BETWEEN)
            if end is None:
                raise Malformed
            give(sink)
            begun = True
        reader.record()
        if end == "]":
            yield from reader.space()
            if (yield from reader.accept(_CLOSE)) is None:
                sink.text(reader.release())
            reader.commit()
            return


def _lines(reader: Reader, sink: CallSink) -> Wait[None]:
    begun = False
    while True:
        yield from reader.space()
        end = yield from reader.accept(_LINES_END)
        if end is None:
            give = yield from _call(reader)
            give(sink)
            begun = True
            reader.record()
        elif not begun:
            raise Malformed
        elif end != ",":
            reader.commit()
            return


def _call(reader: Reader) -> Wait[Callable[[CallSink], None]]:
    """Read one call: what gives it out. Raises Malformed at the first character that cannot be part of one."""
    name = yield from reader.span(_NAME)
    if not name or name[0].isdigit():
        raise Malformed
    yield from reader.space()
    yield from reader.expect(_PARENTHESIS)
    arguments = yield from _arguments(reader)

    def give(sink: CallSink) -> None:
        sink.start(name)
        sink.args(arguments)
        sink.end()

    return give


def _arguments(reader: Reader) -> Wait[str]:
    """The arguments as JSON, up to the parenthesis that closes the call, with it. Keys are read here and not as Python, which has no
    `from` or `my-key` there. Raises Malformed where they are too long, and for anything but literals."""
    written: dict[str, str] = {}
    room = LIMIT
    while True:
        room -= len((yield from reader.space()))
        if (yield from reader.accept(_EMPTY)) is not None:
            break
        key = yield from reader.span(_KEY)
        yield from reader.space()
        yield from reader.expect(_EQUALS)
        if key[:1] in ("", "-", ".") or key in written:
            raise Malformed
        room -= len(key)
        value = yield from _value(reader, room)
        room -= len(value)
        written[key] = _converted(value[:-1])
        if value[-1] == ")":
            break
    return "{" + ", ".join(f"{encoded(key)}: {value}" for key, value in written.items()) + "}"


def _value(reader: Reader, room: int) -> Wait[str]:
    """The text up to what ends a value, with it: a comma, or the parenthesis that closes the call. Raises Malformed where it is longer
    than `room`, or cannot be Python."""
    pieces: list[str] = []
    closers = [")"]
    quote = ""  # that ends the string
    while True:
        text, at = reader.text, reader.at
        broken = False
        while at < len(text) and closers and not broken:
            found = (_STRING if quote else _STRUCTURE).search(text, at)
            if found is None:
                at = len(text)
                break
            char, at = found.group(), found.start()
            if char in "'\"":
                run = text[at : at + 3]
                if len(quote) != 1 and len(run) < 3 and run == char * len(run) and not reader.ended:
                    break  # one quote or three?
                width = 3 if run == char * 3 and len(quote) != 1 else 1
                if not quote:
                    quote = char * width
                elif quote == char * width:
                    quote = ""
                else:
                    width = 1
                at += width
            elif char == "\\":
                if at + 1 == len(text):
                    break
                at += 2
            elif char in _CLOSERS:
                closers.append(_CLOSERS[char])
                at += 1
            elif char == ",":
                at += 1
                if len(closers) == 1:
                    closers.pop()
            elif closers.pop() == char:
                at += 1
            else:
                broken = True
        if at - reader.at > room:
            reader.take(reader.at + max(room, 0))
            raise Malformed
        room -= at - reader.at
        pieces.append(reader.take(at))
        if broken:
            raise Malformed
        if not closers:
            return "".join(pieces)
        yield from reader.more()


def _converted(value: str) -> str:
    """A value as JSON. Raises Malformed for anything but a literal."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in the model's strings
            tree = ast.parse(f"[{value}\n]", mode="eval").body  # in brackets blanks and line breaks mean nothing
        match tree:
            case ast.List(elts=[item]):
                return encoded(_literal(item))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Malformed from error
    raise Malformed


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id=word) if word in _WORDS:
            return _WORDS[word]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_dict_key(key): _literal(value) for key, value in zip(keys, values, strict=True)}
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=ast.Constant(value=int() | float() as number)):
            return -number if isinstance(sign, ast.USub) else number
    raise Malformed


def _dict_key(node: ast.expr | None) -> str:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        raise Malformed
    return node.value


PYTHONIC: Final = ToolFormat(
    names=("pythonic", "llama4", "llama4_pythonic", "olmo3"),
    grammar=_read,
    openers=("<|python_start|>", "<function_calls>"),
    markers=_MARKERS,
)
