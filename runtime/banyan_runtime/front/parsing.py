"""From a JSON object to a typed request, with OpenAI's words for what is wrong with it.

Three kinds of fields: known ones are typed; known ones that this server cannot honour are refused by name, because a
request that is silently served otherwise than asked is worse than an error; unknown ones are ignored, and named in the
header `X-Banyan-Ignored`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Annotated, Any, Final, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails

from banyan_runtime.front.chat.messages import FIRST_PROBLEM
from banyan_runtime.front.errors import ApiError, invalid, invalid_type, missing, unsupported

MAX_PROBLEMS: Final = 10
MAX_IGNORED: Final = 20
MAX_TOP_LOGPROBS: Final = 20
NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")


class RequestModel(BaseModel):
    """Base of all request bodies: JSON types are not converted into each other, and null is the same as absent."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        return {name: item for name, item in value.items() if item is not None} if isinstance(value, dict) else value


def _whole(value: Any) -> Any:
    """64.0 is an integer in JSON."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Int = Annotated[int, BeforeValidator(_whole)]
Number = int | float

Texts = Annotated[list[str], FIRST_PROBLEM]
Ints = Annotated[list[Int], FIRST_PROBLEM]
M = TypeVar("M", bound=RequestModel)

Neutral = Mapping[str, tuple[Any, ...]]
"""Of fields that are known but not served: the values that ask for nothing."""
INSTEAD: Final[Mapping[str, str]] = {
    "stop_regex": "stop",
    "functions": "tools",
    "function_call": "tool_choice",
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), "structured_outputs"),
}
"""Fields that were removed, and the field to use."""

_EXPECTED: Final[Mapping[str, str]] = {
    "string_type": "a string",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "a boolean",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "finite_number": "a finite number",
}


def parse(model: type[M], body: Mapping[str, Any]) -> M:
    """Raises ApiError: missing_required_parameter or invalid_type, with the path of the field in question."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise _explain(error.errors(include_url=False, include_context=False), body) from None


def _explain(problems: list[ErrorDetails], body: Mapping[str, Any]) -> ApiError:
    for problem in problems:
        if problem["type"] == "missing":
            *parents, name = problem["loc"]
            return missing(".".join(part for part in (_path(tuple(parents), body), str(name)) if part))
    by_path: dict[str, list[ErrorDetails]] = {}  # the members of a union each complain
    for problem in problems:
        by_path.setdefault(_path(problem["loc"], body), []).append(problem)
    # The most precise path names the culprit: inside a list that is, not the list that could have been a string.
    paths = sorted(by_path, key=lambda path: -path.count(".") - path.count("["))[:MAX_PROBLEMS]
    worst = by_path[paths[0]]
    reasons = [problem["msg"] for problem in worst if problem["type"] not in _EXPECTED]
    kinds = list(dict.fromkeys(_EXPECTED[problem["type"]] for problem in worst if problem["type"] in _EXPECTED))
    if "a number" in kinds:
        kinds = [kind for kind in kinds if kind != "an integer"]
    if kinds:
        reasons.insert(0, f"expected {' or '.join(kinds)}, got {_json_type(_at(worst[0]['loc'], body))}")
    return invalid_type(paths[0], "; ".join(reasons) + ".")


def _at(loc: tuple[int | str, ...], body: Any) -> Any:
    """The value at a path of pydantic's, which also holds the names of union members."""
    for step in loc:
        if isinstance(body, dict):
            body = body.get(step, body)
        elif isinstance(body, list) and isinstance(step, int) and step < len(body):
            body = body[step]
    return body


def _path(loc: tuple[int | str, ...], body: Any) -> str:
    """A path of pydantic's in our words, without the names of union members."""
    path = ""
    for step in loc:
        if isinstance(step, int) and isinstance(body, list):
            path += f"[{step}]"
        elif isinstance(body, dict) and step in body:
            path += f".{str(step)[:64]}" if path else str(step)[:64]
        else:
            continue
        body = body[step]
    return path


def _json_type(value: Any) -> str:
    if isinstance(value, bool):
        return "a boolean"
    names: dict[type, str] = {str: "a string", int: "an integer", float: "a number", list: "an array", dict: "an object"}
    return names.get(type(value), "null")


def refuse_unsupported(request: RequestModel, neutral: Neutral) -> None:
    """Refuse fields that this server knows but does not have, unless they ask for nothing. Raises ApiError."""
    for name, value in (request.model_extra or {}).items():
        if value is not None and name in neutral and not any(type(value) is type(off) and value == off for off in neutral[name]):
            raise unsupported(name, f"use {INSTEAD[name]}") if name in INSTEAD else unsupported(name)


def unknown(request: BaseModel, known: Set[str]) -> tuple[str, ...]:
    """The fields that are neither declared nor in `known`, as far as they can be named in a header, with those inside others."""
    return tuple(itertools.islice(_unknown(request, known, ""), MAX_IGNORED))


def _unknown(model: BaseModel, known: Set[str], where: str) -> Iterator[str]:
    for name, value in (model.model_extra or {}).items():
        # Clients send back the messages they got, with fields that are there and empty.
        if name not in known and NAME.fullmatch(name) and not (where and value in (None, "", [], {})):
            yield where + name
    for name, value in vars(model).items():  # the fields, and nothing else
        if isinstance(value, BaseModel):
            yield from _unknown(value, _silent(value), f"{where}{name}.")
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if not isinstance(item, BaseModel | str):
                    break  # not a list of objects, though texts may stand among those
                if isinstance(item, BaseModel):
                    yield from _unknown(item, _silent(item), f"{where}{name}[{index}].")


def strangers(value: object, known: Set[str], where: str) -> Iterator[str]:
    """The fields that nobody knows of an object for which there is no model, as `unknown` names them."""
    for name, given in value.items() if isinstance(value, dict) else ():
        if name not in known and NAME.fullmatch(name) and given not in (None, "", [], {}):
            yield f"{where}.{name}"


def string_of(value: Mapping[str, Any], name: str, where: str) -> str:
    """A field of an object for which there is no model. Raises ApiError."""
    found = value.get(name)
    if found is None:
        raise missing(f"{where}.{name}")
    if not isinstance(found, str):
        raise invalid_type(f"{where}.{name}", "expected a string.")
    return found


def _silent(model: BaseModel) -> Set[str]:
    """Fields of an object inside a request that have an effect, or need no mention, without being declared."""
    silent: Set[str] = getattr(model, "SILENT", frozenset())
    return silent


def check_name(param: str, name: str) -> None:
    """Raises ApiError for what may be no name of a tool or a schema."""
    if not NAME.fullmatch(name):
        raise invalid(param, f"Invalid '{param}': '{name[:100]}' must be 1 to 64 letters, digits, '_' or '-'.")


def check_choice(param: str, value: str | None, allowed: Sequence[str]) -> None:
    """Raises ApiError, which names the allowed values, for any other."""
    if value is not None and value not in allowed:
        raise invalid(param, f"Invalid value for '{param}': '{value[:64]}'. Supported values are: {', '.join(allowed)}.")


def check_top_logprobs(param: str, number: int) -> None:
    """Raises ApiError for more likeliest tokens than are told, or fewer than none."""
    if number < 0:
        raise invalid(param, f"{param} must be at least 0, got {shown(number)}.", "integer_below_min_value")
    if number > MAX_TOP_LOGPROBS:
        message = f"Requested sample logprobs of {shown(number)}, which is greater than max allowed: {MAX_TOP_LOGPROBS}"
        raise invalid(param, message, "integer_above_max_value")


def shown(number: float) -> str:
    """A number of a client's as an error repeats it: some have more digits than Python would print."""
    return str(number) if isinstance(number, float) or abs(number) < 10**40 else "a number of more than 40 digits"
