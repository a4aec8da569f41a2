"""Models into structural OpenAPI schemas, as a CustomResourceDefinition wants them."""

from __future__ import annotations

import types
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from annotated_types import Ge, Le, MaxLen, MinLen
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from banyan_operator.api.base import FieldRule, Format, IntOrString, ListType, Model, Raw
from banyan_operator.api.rules import Rule, Transition

Schema = dict[str, Any]

_LENGTHS: Final = {"string": ("minLength", "maxLength"), "array": ("minItems", "maxItems"), "object": ("minProperties", "maxProperties")}
_SCALARS: Final = {str: "string", int: "integer", bool: "boolean"}


def of_model(model: type[Model], description: str | None = None) -> Schema:
    """The schema of one object: properties, required fields and rules."""
    schema: Schema = {"type": "object"}
    if description:
        schema["description"] = description
    properties, required = {}, []
    for name, field in model.model_fields.items():
        key = field.alias or name
        properties[key] = _of_field(field)
        if field.is_required():
            required.append(key)
    schema["properties"] = properties
    if required:
        schema["required"] = required
    if model.RULES:
        schema["x-kubernetes-validations"] = rules(model.RULES)
    return schema


def rules(declared: Sequence[Rule | Transition]) -> list[Schema]:
    return [{"rule": rule.cel, "message": rule.message} for rule in declared]


def _of_field(field: FieldInfo) -> Schema:
    schema = _of_type(field.annotation, tuple(field.metadata))
    if field.description:
        schema = (
            {"type": schema.pop("type"), "description": field.description} | schema
            if "type" in schema
            else schema | {"description": field.description}
        )
    default = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(default, Model):
        default = default.dump()
    elif isinstance(default, tuple):
        default = [item.dump() if isinstance(item, Model) else item for item in default]
    if default not in (None, PydanticUndefined, {}, []):
        schema["default"] = default
    return schema


def _of_type(annotation: Any, metadata: Sequence[Any]) -> Schema:
    annotation, metadata = _unwrap(annotation, metadata)
    marker = next((item for item in metadata if isinstance(item, IntOrString | Raw)), None)
    if isinstance(marker, IntOrString):
        schema: Schema = {"x-kubernetes-int-or-string": True, "anyOf": [{"type": "integer"}, {"type": "string"}]}
        return schema | {"minimum": 0, "maxLength": marker.max_length, "pattern": marker.pattern}
    if isinstance(marker, Raw):
        return {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    origin = get_origin(annotation)
    if isinstance(annotation, type) and issubclass(annotation, Model):
        return of_model(annotation)
    if origin is Literal:
        return {"type": "string", "enum": list(get_args(annotation))}
    if origin is tuple:
        schema = {"type": "array", "items": _of_type(get_args(annotation)[0], ())}
    elif origin is dict:
        schema = {"type": "object", "additionalProperties": _of_type(get_args(annotation)[1], ())}
    else:
        schema = {"type": _SCALARS[annotation]}
    return schema | _keywords(schema["type"], metadata)


def _unwrap(annotation: Any, metadata: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
    """Take Annotated[…] and … | None apart into the bare type and all that is said about it."""
    found = list(metadata)
    while True:
        origin = get_origin(annotation)
        if origin is Annotated:
            annotation, *more = get_args(annotation)
            found = [*more, *found]
        elif origin in (Union, types.UnionType) and type(None) in get_args(annotation):
            (annotation,) = (part for part in get_args(annotation) if part is not type(None))
        else:
            break
    return annotation, tuple(_flatten(found))


def _flatten(metadata: Iterable[Any]) -> Iterable[Any]:
    for item in metadata:
        if isinstance(item, FieldInfo):
            yield from item.metadata
        else:
            yield item


def _keywords(kind: str, metadata: Sequence[Any]) -> Schema:
    low, high = _LENGTHS.get(kind, ("", ""))
    schema: Schema = {}
    for item in metadata:
        match item:
            case Format(name):
                schema["format"] = name
            case Ge(ge):
                schema["minimum"] = ge
            case Le(le):
                schema["maximum"] = le
            case MinLen(length):
                schema[low] = length
            case MaxLen(length):
                schema[high] = length
            case ListType(list_kind, keys):
                schema["x-kubernetes-list-type"] = list_kind
                if keys:
                    schema["x-kubernetes-list-map-keys"] = list(keys)
            case FieldRule(rule):
                schema["x-kubernetes-validations"] = rules([rule])
            case _ if getattr(item, "pattern", None):
                schema["pattern"] = item.pattern
            case _:
                raise AssertionError(f"no CRD keyword says {item!r}")
    return schema
