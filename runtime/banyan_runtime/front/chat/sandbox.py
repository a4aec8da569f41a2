"""What a chat template may do: Jinja's sandbox, the names that Hugging Face templates expect, and no huge text at one stroke.

Whoever waits for a template can interrupt Python but no single call into C, so whatever makes a long text of a short one is
bounded here. What a template makes little by little is the business of the limits on time and memory around it.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter

MAX_LENGTH: Final = 1_000_000  # of what one operation makes by repeating or padding
_NUMBER: Final = re.compile(r"\d+")
_PERCENT: Final = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(\*|\d*)(?:\.(\*|\d*))?")
_PADDING_FILTERS: Final = ("batch", "center", "indent", "slice", "truncate", "wordwrap")
_MAX_BITS: Final = 65_536  # of a product: multiplying takes long in a number that has millions
_MAX_DIGITS: Final = len(str(MAX_LENGTH))


def environment() -> jinja2.Environment:
    """A fresh one, for one template. Nothing of a template is computed while it is compiled."""
    made = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], optimized=False)
    made.filters |= {name: _bounded(made.filters[name]) for name in _PADDING_FILTERS}
    made.filters["tojson"] = _bounded(_tojson)
    made.filters["format"] = _format
    made.globals["raise_exception"] = _raise
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant text for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Generator(CodeGenerator):
    """Writes down constants and leaves expressions to the rendering; Jinja's own also computes those without variables."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)

    def visit_EvalContextModifier(self, node: nodes.EvalContextModifier, frame: Frame) -> None:
        if not all(isinstance(option.value, nodes.Const) for option in node.options):
            self.fail("autoescape takes true or false", node.lineno)
        super().visit_EvalContextModifier(node, frame)


class _Environment(ImmutableSandboxedEnvironment):
    code_generator_class = _Generator
    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > _MAX_BITS:
                raise SecurityError("a number is too large")
            for sequence, times in ((left, right), (right, left)):
                if isinstance(sequence, str | bytes | list | tuple) and isinstance(times, int) and len(sequence) * times > MAX_LENGTH:
                    raise SecurityError("a repeated sequence is too long")
        elif operator == "**" and isinstance(left, int) and isinstance(right, int) and abs(right) > 64:
            raise SecurityError("an exponent is too large")
        elif operator == "%" and isinstance(left, str | bytes):
            _check_percent(left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(getattr(__obj, "__self__", None), str | bytes | int):  # 'a'.center(…) and its like
            _check_numbers(*args, *kwargs.values())
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        form: str = value.__self__
        formatter = _Formatter(self)
        if value.__name__ == "format_map":
            return lambda mapping: formatter.vformat(form, (), mapping)
        return lambda *args, **kwargs: formatter.vformat(form, args, kwargs)


class _Formatter(SandboxedFormatter):
    """`str.format`, with what it fills in no wider than anything else."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        _check_widths(format_spec)
        return super().format_field(value, format_spec)


def _check_numbers(*arguments: Any) -> None:
    for argument in arguments:
        if isinstance(argument, int) and argument > MAX_LENGTH:
            raise SecurityError("a text is made too long")


def _check_widths(form: str) -> None:
    if any(len(digits) > _MAX_DIGITS or int(digits) > MAX_LENGTH for digits in _NUMBER.findall(form)):
        raise SecurityError("a text is formatted too wide")


def _check_percent(form: str | bytes, values: Any) -> None:
    for field in _PERCENT.finditer(form if isinstance(form, str) else form.decode("latin-1")):
        if "*" in field.groups():  # the width is among the values
            _check_numbers(*(values if isinstance(values, tuple) else (values,)))
        _check_widths(field[0])


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that takes no huge number, such as a width, beside what it filters."""

    @functools.wraps(function)  # also the marks of what Jinja is to pass
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _check_numbers(*args[1:], *kwargs.values())
        return function(*args, **kwargs)

    return bounded


def _format(value: str, *args: Any, **kwargs: Any) -> str:
    form = str(value)
    _check_percent(form, kwargs or args)
    return form % (kwargs or args)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    """Jinja's own filter escapes HTML, which would show up in prompts."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
