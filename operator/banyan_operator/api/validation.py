"""Manifests into checked resources, and what is wrong with those that are not: field, value and what to do.

The API server applies the same schema and rules before an object is stored. They are applied here again because local mode
has no API server, and because an object may be older than the schema.
"""

from __future__ import annotations

import copy
import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, TypeVar, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from banyan_operator.api.base import Model
from banyan_operator.api.batchjob import BatchJobSpec
from banyan_operator.api.inferenceserver import InferenceServerSpec
from banyan_operator.api.parts import DATA_URI, MODEL_URI, URL, Resources, Runtime
from banyan_operator.api.quantity import amount
from banyan_operator.api.resources import API_VERSION, KINDS, NAME_RULES, BatchJob, InferenceServer, Metadata, Resource
from banyan_operator.api.rules import Transition

M = TypeVar("M", bound=Model)


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a manifest."""

    field: str
    message: str

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


class SpecError(Exception):
    """A manifest that the user has to put right."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        assert problems
        self.problems = tuple(problems)
        super().__init__("; ".join(map(str, problems)))


def parse(manifest: Mapping[str, Any], *, strict: bool = True) -> Resource:
    """The resource that a manifest describes, with defaults filled in.

    `strict`: fields that the schema does not know are an error, as suits a file that somebody wrote. What an API server stores
    has passed its own schema, which may be of another version: there they count as left out, and rules for what is new are not asked.

    Raises SpecError with every problem of the first layer that has one: kind and name, schema and rules, values between them.
    """
    kind = _kind(manifest)
    metadata = Metadata.of(manifest)
    spec = manifest.get("spec")
    if not isinstance(spec, Mapping):
        raise SpecError([Problem("spec", f"is required; see 'kubectl explain {KINDS[kind].singular}.spec'")])
    if kind == "InferenceServer":
        server = InferenceServer(metadata, _model(InferenceServerSpec, spec, strict))
        _raise(_between_values("spec", server.spec.runtime, server.spec.resources))
        return server
    job = BatchJob(metadata, _model(BatchJobSpec, spec, strict))
    own = job.spec.server
    _raise(_resources("spec.resources", job.spec.resources) + (_between_values("spec.server", own.runtime, own.resources) if own else []))
    return job


def check_update(new: Resource, old: Resource) -> None:
    """Raise SpecError when `new` changes what must not change in `old`. The API server does this in a cluster."""
    stored = new.spec.stored(), old.spec.stored()
    broken = [rule.message for rule in new.spec.RULES if isinstance(rule, Transition) and not rule.holds(*stored)]
    _raise([_of_change(message) for message in broken])


def _of_change(message: str) -> Problem:
    """'spec.input cannot change', which the API server says of the spec, as a problem of that field."""
    field, _, text = message.partition(" ")
    return Problem(field, text) if field.startswith("spec.") else Problem("spec", message)


def _kind(manifest: Mapping[str, Any]) -> str:
    kind, version = manifest.get("kind"), manifest.get("apiVersion")
    if kind not in KINDS:
        raise SpecError([Problem("kind", f"{kind!r} is not one of {', '.join(KINDS)}")])
    if version != API_VERSION:
        raise SpecError([Problem("apiVersion", f"is {version!r}; write {API_VERSION}")])
    name = (manifest.get("metadata") or {}).get("name")
    if not isinstance(name, str):
        raise SpecError([Problem("metadata.name", "is required")])
    for rule in NAME_RULES:
        if not rule.holds({"metadata": {"name": name}}):
            raise SpecError([Problem("metadata.name", f"{name!r} is refused: {rule.message}")])
    return str(kind)


def _model(model: type[M], spec: Mapping[str, Any], strict: bool) -> M:
    known = _without_null(spec)
    try:
        checked: M = _validated(model, json.dumps(known))
        return checked
    except ValidationError as error:
        found = error.errors(include_url=False)
        if not strict and any(item["type"] == "extra_forbidden" for item in found):
            return _model(model, _as_stored(known, found), strict=True)
        raise SpecError([_problem(model, item) for item in found]) from None


@lru_cache(maxsize=512)  # each reconcile parses the spec again, which rarely differs; models are immutable
def _validated(model: type[M], spec: str) -> M:
    return model.model_validate_json(spec, by_alias=True, by_name=False)


def _without_null(value: Any) -> Any:
    """Fields set to null count as left out, as in the API server."""
    if isinstance(value, Mapping):
        return {key: _without_null(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_null(item) for item in value]
    return value


def _as_stored(spec: Any, problems: Iterable[ErrorDetails]) -> Any:
    """A copy without the fields that are not known."""
    copied = copy.deepcopy(spec)
    for item in problems:
        node = copied
        *path, last = item["loc"]
        for step in path:
            node = node[step]
        if item["type"] == "extra_forbidden":
            del node[last]
    return copied


def _raise(problems: Sequence[Problem]) -> None:
    if problems:
        raise SpecError(problems)


# --- values that must fit together, beyond what CEL in the schema can say ---


def _between_values(path: str, runtime: Runtime, resources: Resources) -> list[Problem]:
    problems = _resources(f"{path}.resources", resources)
    page = runtime.kv_cache.page_size if runtime.kv_cache else None
    chunk = runtime.chunked_prefill_tokens
    if page and chunk and chunk % page:
        text = f"{chunk} must be a multiple of kvCache.pageSize ({page}); use {chunk // page * page or page}"
        problems.append(Problem(f"{path}.runtime.chunkedPrefillTokens", text))
    return problems


def _resources(path: str, resources: Resources) -> list[Problem]:
    return [
        Problem(f"{path}.requests.{key}", f"{wanted} is more than the limit {resources.limits[key]}; raise the limit or ask for less")
        for key, wanted in resources.requests.items()
        if key in resources.limits and amount(wanted) > amount(resources.limits[key])
    ]


# --- pydantic's findings in the words of the manifest ---

_TYPES: Final = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "string_type": "must be text; put it in quotes",
    "bool_type": "must be true or false",
    "tuple_type": "must be a list",
    "dict_type": "must be a mapping",
    "model_type": "must be a mapping",
    "model_attributes_type": "must be a mapping",
}


def _problem(model: type[Model], item: ErrorDetails) -> Problem:
    loc, value, context = item["loc"], item["input"], item.get("ctx", {})
    path = "spec" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
    field = _field_at(model, loc)
    match item["type"]:
        case "missing":
            text = "is required" + (f". {field.description}" if field and field.description else "")
        case "extra_forbidden":
            text = "is not a field" + _suggestion(model, loc)
        case "rule":
            text = str(context["rules"])
        case "literal_error":
            text = f"{value!r} is not one of {', '.join(_choices(field)) or context['expected']}"
        case "string_pattern_mismatch" | "string_too_short":
            hint = (
                _form(str(value), context.get("pattern", ""))
                or (field.description if field else None)
                or f"It must match {context.get('pattern', '.+')}"
            )
            text = f"{value!r} has the wrong form. {hint}"
        case "greater_than_equal":
            text = f"{value} is too small; use at least {context['ge']}"
        case "less_than_equal":
            text = f"{value} is too large; use at most {context['le']}"
        case "string_too_long" | "too_long" | "too_short":
            text = item["msg"][0].lower() + item["msg"][1:]
        case "duplicate":
            text = item["msg"]
        case "int_or_string":
            text = f"{value!r} {item['msg']}"
        case other:
            text = f"{value!r} {_TYPES.get(other, item['msg'])}"
    return Problem(path, text)


_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


def _form(value: str, pattern: str) -> str | None:
    """What is wrong with an address that its field's description does not say."""
    if pattern in (MODEL_URI, DATA_URI) and value.startswith("s3://"):
        bucket = value.removeprefix("s3://").partition("/")[0]
        if not _BUCKET.fullmatch(bucket):
            return (
                f"A bucket's name, here {bucket!r}, has 3 to 63 lower case letters, digits, dots and dashes, first and last no dot or dash"
            )
    if pattern == URL and not value.startswith(("http://", "https://")):
        return "It begins with http:// or https://"
    return None


def _field_at(model: type[Model], loc: Sequence[int | str]) -> FieldInfo | None:
    """The declaration of the field that `loc` leads to."""
    found: FieldInfo | None = None
    current: type[Model] | None = model
    for part in loc:
        if isinstance(part, int):
            continue
        if current is None:
            return found
        found = next((field for field in current.model_fields.values() if field.alias == part), None)
        current = _model_in(found.annotation) if found else None
    return found


def _model_in(annotation: Any) -> type[Model] | None:
    if isinstance(annotation, type) and issubclass(annotation, Model):
        return annotation
    return next((inner for part in get_args(annotation) if (inner := _model_in(part))), None)


def _choices(field: FieldInfo | None) -> list[str]:
    return [part for part in get_args(field.annotation) if isinstance(part, str)] if field else []


def _suggestion(model: type[Model], loc: Sequence[int | str]) -> str:
    parents = [part for part in loc[:-1] if isinstance(part, str)]
    parent = _field_at(model, parents) if parents else None
    owner = (_model_in(parent.annotation) if parent else None) or model
    names = [str(field.alias) for field in owner.model_fields.values()]
    near = difflib.get_close_matches(str(loc[-1]), names, n=1)
    return f"; did you mean {near[0]}?" if near else f"; known are {', '.join(names)}"
