"""Tiny models that transformers writes."""

from tests.support.models.library import library_model  # noqa: F401
from tests.support.models.tiny import _few_threads, tiny_model  # noqa: F401
