"""Times as the Kubernetes API writes them: RFC 3339, UTC, whole seconds."""

from __future__ import annotations

from datetime import UTC, datetime


def stamp(seconds: float) -> str:
    """`seconds` since the epoch as '2026-11-21T12:00:00Z'."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds(stamp: str) -> float:
    """The inverse of `stamp`; also takes fractions and offsets."""
    return datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()
