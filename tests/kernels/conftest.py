"""Tiny models and the runners they are loaded with."""

from tests.support.models.tiny import (  # noqa: F401
    _few_threads,
    _quick_interpreter,
    shallow_model,
    tiny_model,
)
