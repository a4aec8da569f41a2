"""Resources as `kubectl get` shows them: the same columns from the same declaration."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from banyan_operator.api import KINDS
from banyan_operator.kube.objects import key_of
from banyan_operator.local.objects import NAMESPACE
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


def age(passed: float) -> str:
    """Seconds as kubectl writes them: 45s, 3m20s, 38m, 5h12m, 3d4h, 12d"""
    s = max(0, int(passed))
    if s < 120:
        return f"{s}s"
    minutes, hours, days = s // 60, s // 3600, s // 86400
    if minutes < 10:
        return f"{minutes}m{s % 60}s" if s % 60 else f"{minutes}m"
    if minutes < 180:
        return f"{minutes}m"
    if hours < 8:
        return f"{hours}h{minutes % 60}m" if minutes % 60 else f"{hours}h"
    if hours < 48:
        return f"{hours}h"
    if days < 8:
        return f"{days}d{hours % 24}h" if hours % 24 else f"{days}d"
    return f"{days}d"


def _aligned(rows: Iterable[Sequence[str]]) -> str:
    found = list(rows)
    widths = [max(len(row[column]) for row in found) for column in range(len(found[0]))]
    return "\n".join(GAP.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in found)
