"""Architectures of the transformers backend that a test compares with the library's own results, for docs/models.md."""

from __future__ import annotations

from typing import Final

COMPARED: Final = frozenset[str]()
