"""`banyan-runtime serve` in a system that starts no more threads from the moment the file $NO_THREADS exists."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

from banyan_runtime.cli import main

_start = threading._start_new_thread  # type: ignore[attr-defined]


def _refused(*arguments: Any) -> Any:
    if Path(os.environ["NO_THREADS"]).exists():
        raise RuntimeError("can't start new thread")
    return _start(*arguments)


threading._start_new_thread = _refused  # type: ignore[attr-defined]

if __name__ == "__main__":
    sys.exit(main())
