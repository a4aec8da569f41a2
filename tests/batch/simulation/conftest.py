"""Lets these tests import what they share."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = str(Path(__file__).parents[3])
if ROOT not in sys.path:  # appended, so that nothing here comes before an installed package
    sys.path.append(ROOT)
