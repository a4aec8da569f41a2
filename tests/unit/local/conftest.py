"""Pods by hand, and a program that stands in for the runtime."""

from tests.support.local import lead_pod, stand_in, start_operator  # noqa: F401
