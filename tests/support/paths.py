"""Folders that tests use."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
CACHE: Final = Path(os.environ.get("BANYAN_TEST_CACHE", Path.home() / ".cache" / "banyan" / "tests"))
"""Models, tokenizers and environments that are fetched or made once."""
