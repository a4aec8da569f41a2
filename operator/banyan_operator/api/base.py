"""The base of all API models, and the markers that say in Python what a CRD schema says in OpenAPI keywords.

A field's type, default and limits are declared once, in pydantic's terms. `schema` turns them into the CRD, `validation`
applies them where no API server does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from banyan_operator.api.quantity import PATTERN as QUANTITY_PATTERN
from banyan_operator.api.rules import Rule, Transition

_ACRONYMS = {
    "min_memory_mib": "minMemoryMiB",
    "output_uri": "outputURI",
    "errors_uri": "errorsURI",
    "manifest_uri": "manifestURI",
    "run_id": "runID",
}


def api_name(name: str) -> str:
    """A field's name in manifests."""
    return _ACRONYMS.get(name) or to_camel(name.removesuffix("_"))


class Model(BaseModel):
    """A part of a resource: camelCase outside, snake_case inside, immutable, unknown fields refused."""

    model_config = ConfigDict(alias_generator=api_name, populate_by_name=True, extra="forbid", frozen=True, strict=True)

    RULES: ClassVar[tuple[Rule | Transition, ...]] = ()

    @model_validator(mode="after")
    def _keep_the_rules(self) -> Self:
        stored = self.stored() if self.RULES else {}
        broken = [rule.message for rule in self.RULES if isinstance(rule, Rule) and not rule.holds(stored)]
        if broken:
            raise PydanticCustomError("rule", "{rules}", {"rules": "; ".join(broken)})
        return self

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        return self  # immutable; pydantic copies each default that it fills in

    def stored(self) -> dict[str, Any]:
        """As the API server stores it: JSON with defaults, in the API's names."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)

    def dump(self) -> dict[str, Any]:
        """As JSON, in the API's names, without what is unset or empty."""
        dumped: dict[str, Any] = _without_empty(self.stored())
        return dumped


def _without_empty(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: _without_empty(item) for key, item in value.items()}
        return {key: item for key, item in kept.items() if item not in ({}, [])}
    if isinstance(value, list):
        return [_without_empty(item) for item in value]
    return value


@dataclass(frozen=True, slots=True)
class Format:
    """The OpenAPI format of a number or string: int32, int64, date-time."""

    name: str


@dataclass(frozen=True, slots=True)
class ListType:
    """How server-side apply merges a list, and what must not occur twice in it."""

    kind: Literal["atomic", "set", "map"]
    keys: tuple[str, ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._unique, handler(source))

    def _unique(self, items: tuple[Any, ...]) -> tuple[Any, ...]:
        if self.kind == "atomic":
            return items
        seen: list[Any] = []
        for item in items:
            key = tuple(getattr(item, name) for name in self.keys) if self.keys else item
            if key in seen:
                shown = ", ".join(map(str, key)) if self.keys else key
                raise PydanticCustomError("duplicate", "{shown} occurs twice; remove one", {"shown": str(shown)})
            seen.append(key)
        return items


@dataclass(frozen=True, slots=True)
class FieldRule:
    """A rule of one field's own value; `Model.RULES` holds those between fields."""

    rule: Rule

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, value: Any) -> Any:
        if not self.rule.holds(value):
            raise PydanticCustomError("rule", "{rules}", {"rules": self.rule.told(value)})
        return value


@dataclass(frozen=True, slots=True)
class IntOrString:
    """A whole number that is not negative, or text of a pattern: Kubernetes' quantities, and counts that may be percentages."""

    pattern: str
    max_length: int

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def _check(self, value: Any) -> int | str:
        negative = value.startswith("-") if isinstance(value, str) else isinstance(value, int) and value < 0
        if negative:
            raise PydanticCustomError("int_or_string", "must not be negative")
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, str) and len(value) <= self.max_length and re.search(self.pattern, value):
            return value
        raise PydanticCustomError("int_or_string", "must be a whole number, or text such as {example}", {"example": self.example})

    @property
    def example(self) -> str:
        return "'500m' or '4Gi'" if self.pattern == QUANTITY_PATTERN else "'25%'"


@dataclass(frozen=True, slots=True)
class Raw:
    """An object of another API, passed through unchecked (the API server checks it when the child is applied)."""


NAME_PATTERN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
KEY_PATTERN = r"^[-._a-zA-Z0-9]+$"

Int32 = Annotated[int, Format("int32")]
Int64 = Annotated[int, Format("int64")]
Count32 = Annotated[int, Format("int32"), Field(ge=0)]
Count64 = Annotated[int, Format("int64"), Field(ge=0)]
Time = Annotated[str, Format("date-time")]
ObjectName = Annotated[str, Field(pattern=NAME_PATTERN, min_length=1, max_length=253)]
KeyName = Annotated[str, Field(pattern=KEY_PATTERN, min_length=1, max_length=253)]
PortNumber = Annotated[int, Format("int32"), Field(ge=1, le=65535)]
Quantity = Annotated[int | str, IntOrString(QUANTITY_PATTERN, 32)]
PERCENT = r"^[0-9]{1,3}%$"
CountOrPercent = Annotated[int | str, IntOrString(PERCENT, 8)]
Labels = Annotated[dict[str, Annotated[str, Field(max_length=63)]], Field(max_length=32)]
Annotations = Annotated[dict[str, Annotated[str, Field(max_length=4096)]], Field(max_length=32)]
RawObject = Annotated[dict[str, Any], Raw()]
