"""Operators in local mode, and a program that stands in for the runtime."""

from tests.support.local import stand_in, start_operator  # noqa: F401
