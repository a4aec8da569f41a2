"""Times as the Kubernetes API writes them, and durations as people read them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import overload


def stamp(seconds: float) -> str:
    """Unix seconds as RFC 3339 in UTC, to the second: '2026-11-21T12:00:00Z'."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@overload
def seconds(text: str) -> float: ...
@overload
def seconds(text: str | None) -> float | None: ...
def seconds(text: str | None) -> float | None:
    """The inverse of `stamp`; also takes fractions and offsets. None for a time that is not set."""
    return datetime.fromisoformat(text).timestamp() if text else None


def rough(duration_s: float) -> str:
    """A duration in its two largest units, rounded up: 45s, 12m, 1h20m, 3d4h."""
    left = max(0, int(-(-duration_s // 1)))
    if left < 60:
        return f"{left}s"
    for upper, lower, upper_name, lower_name in ((86400, 3600, "d", "h"), (3600, 60, "h", "m")):
        if left >= upper:
            parts = -(-left // lower)
            high, low = divmod(parts, upper // lower)
            return f"{high}{upper_name}{low}{lower_name}" if low else f"{high}{upper_name}"
    minutes = -(-left // 60)
    return f"{minutes}m" if minutes < 60 else "1h"
