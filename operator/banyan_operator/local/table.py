"""Resources as `kubectl get` shows them: the same columns from the same declaration."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

from banyan_operator.api import KINDS
from banyan_operator.kube.objects import key_of
from banyan_operator.local.status import NAMESPACE
from banyan_operator.plan import Manifest
from banyan_operator.times import seconds

GAP = "   "
_STEP = re.compile(r'\.([A-Za-z]+)|\[\?\(@\.([A-Za-z]+)=="([^"]*)"\)\]')


def render(resources: Sequence[Manifest], *, wide: bool, now: float) -> str:
    """A table for each kind, `banyan-operator status` in full."""
    parts = []
    several = any(key_of(resource).namespace != NAMESPACE for resource in resources)  # then as with 'kubectl get -A'
    for kind in KINDS.values():
        found = [resource for resource in resources if resource["kind"] == kind.kind]
        if not found:
            continue
        columns = [column for column in kind.columns if wide or column.priority == 0]
        rows = [[*(["NAMESPACE"] if several else []), "NAME", *(column.name.upper() for column in columns)]]
        for resource in found:
            cells = [_cell(lookup(resource, column.path), column.type, now) for column in columns]
            namespace = [key_of(resource).namespace] if several else []
            rows.append([*namespace, f"{kind.plural.removesuffix('s')}/{resource['metadata']['name']}", *cells])
        parts.append(_aligned(rows))
    return "\n\n".join(parts)


def lookup(resource: Manifest, path: str) -> Any:
    """The value at a JSON path of the forms that printer columns use, or None."""
    value: Any = resource
    for field, key, wanted in _STEP.findall(path):
        if field:
            value = value.get(field) if isinstance(value, dict) else None
        else:
            value = next((item for item in value or () if item.get(key) == wanted), None)
        if value is None:
            return None
    return value


def _cell(value: Any, kind: str, now: float) -> str:
    if value is None:
        return ""
    return age(now - seconds(value)) if kind == "date" else str(value)


_AGES: Final = (  # below so many seconds: the unit, and the lower one where it is shown
    (120, 1, "s", 0, ""),
    (600, 60, "m", 1, "s"),
    (10_800, 60, "m", 0, ""),
    (28_800, 3600, "h", 60, "m"),
    (172_800, 3600, "h", 0, ""),
    (691_200, 86_400, "d", 3600, "h"),
)


def age(passed: float) -> str:
    """Seconds as kubectl writes them: 45s, 3m20s, 38m, 5h12m, 3d4h, 12d"""
    whole = max(0, int(passed))
    unit, name, lower, lower_name = next((row[1:] for row in _AGES if whole < row[0]), (86_400, "d", 0, ""))
    rest = whole % unit // lower if lower else 0
    return f"{whole // unit}{name}" + (f"{rest}{lower_name}" if rest else "")


def _aligned(rows: Iterable[Sequence[str]]) -> str:
    found = list(rows)
    widths = [max(len(row[column]) for row in found) for column in range(len(found[0]))]
    return "\n".join(GAP.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in found)
