"""Lets the tests of the engine import what they share. Appended, so that nothing here comes before an installed package."""

import sys
from pathlib import Path

ROOT = str(Path(__file__).parents[2])
if ROOT not in sys.path:
    sys.path.append(ROOT)
