"""What the libraries that load tokenizers may not do in a process of ours."""

from __future__ import annotations

import os
import sys


def isolate() -> None:
    """Let transformers find no torch in this process: importing it would cost seconds and 200 MB, for nothing. Nor may tokenizers
    start threads, which a fork would lose."""
    assert sys.modules.get("torch") is None, "this process must not have torch"
    sys.modules["torch"] = None  # type: ignore[assignment]  # Python's own way to say: not there
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
