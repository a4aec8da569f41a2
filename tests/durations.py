"""Print a table of durations from JUnit files: seconds by folder and by file, and each file's share of the whole.

    python tests/durations.py FILE.xml... > tests/durations/gate.md

Seconds are those of a test with its fixtures, summed over all worker processes.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

FILES_SHOWN = 60


def read(files: Iterable[Path]) -> tuple[Counter[str], Counter[str]]:
    """Seconds and numbers of tests by file, such as tests/unit/engine/test_engine.py."""
    seconds: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    for file in files:
        for case in ElementTree.parse(file).iter("testcase"):
            parts = [part for part in case.get("classname", "").split(".") if not part.startswith("Test")]
            name = "/".join(parts) + ".py"
            seconds[name] += float(case.get("time", "0"))  # type: ignore[assignment]
            tests[name] += 1
    return seconds, tests


def folder(file: str) -> str:
    parts = file.split("/")[:-1]
    return "/".join(parts[:3])


def table(seconds: Counter[str], tests: Counter[str]) -> str:
    whole = sum(seconds.values()) or 1.0
    by_folder: Counter[str] = Counter()
    tests_by_folder: Counter[str] = Counter()
    for file, took in seconds.items():
        by_folder[folder(file)] += took
        tests_by_folder[folder(file)] += tests[file]
    lines = [f"{sum(tests.values())} tests, {whole:.0f} s.", "", "| folder | tests | seconds | share |", "|---|---:|---:|---:|"]
    lines += [f"| {name} | {tests_by_folder[name]} | {took:.0f} | {took / whole:.1%} |" for name, took in by_folder.most_common()]
    lines += ["", "| file | tests | seconds | share |", "|---|---:|---:|---:|"]
    shown = seconds.most_common(FILES_SHOWN)
    lines += [f"| {name} | {tests[name]} | {took:.1f} | {took / whole:.1%} |" for name, took in shown]
    rest = whole - sum(took for _, took in shown)
    lines.append(f"| {len(seconds) - len(shown)} more files | | {rest:.1f} | {rest / whole:.1%} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(*read(map(Path, sys.argv[1:]))), end="")
