"""Times as the Kubernetes API writes them."""

from __future__ import annotations

from datetime import UTC, datetime


def stamp(now: float) -> str:
    """Unix seconds as RFC 3339, to the second."""
    return datetime.fromtimestamp(int(now), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds(text: str | None) -> float | None:
    """RFC 3339 as unix seconds."""
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
