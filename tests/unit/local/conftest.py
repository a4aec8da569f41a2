"""Pods by hand."""

from tests.support.local import lead_pod  # noqa: F401
