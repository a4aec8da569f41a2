"""What is the case: children as seen, into conditions, phase, message and counts. Pure; the time is handed in."""

from __future__ import annotations
