"""A plugin of pytest that prints each failure when it is found: a run on a GPU whose minutes are counted may not reach its end.

pytest -p tests.kernels.at_once
"""

from __future__ import annotations

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        print(f"\n{report.nodeid} failed ({report.when}):\n{report.longreprtext}", flush=True)
